"""Differentiable inner loops, with memory as an argument."""
