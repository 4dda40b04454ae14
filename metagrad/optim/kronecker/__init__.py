"""Functional optimizers that keep a matrix for each axis of a parameter."""
