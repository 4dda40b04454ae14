"""Optimizers that store a matrix for each axis of a parameter."""
