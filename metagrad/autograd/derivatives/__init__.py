"""Gradients, Hessian-vector products and linearizations of a loss."""
