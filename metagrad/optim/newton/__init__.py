"""Optimizers that move all parameters as one vector: Newton, Gauss-Newton, L-BFGS and least squares."""
