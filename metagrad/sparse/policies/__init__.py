"""Sparse or dense, where cotangents are added, and what was saved."""
