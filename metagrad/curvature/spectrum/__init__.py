"""Eigenvalues, spectral densities and log-determinants, by Lanczos processes."""
