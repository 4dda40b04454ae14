"""Differentiable architecture search."""
