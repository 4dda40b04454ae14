"""Sparse matrices: a pattern, the values of its entries, and their other forms."""
