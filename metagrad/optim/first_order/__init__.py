"""Functional optimizers that use only gradients."""
