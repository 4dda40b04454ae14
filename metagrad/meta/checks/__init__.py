"""Checks before training: which derivatives are correct, and how much memory a step needs."""
