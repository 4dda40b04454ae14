"""Adversarial examples of first and second order, and defences that penalise derivatives in the input."""
