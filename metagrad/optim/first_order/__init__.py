"""Functional optimizers that use gradients alone."""
