"""Sparse kernels and their derivatives: two families closed under differentiation."""
