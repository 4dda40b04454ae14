"""Functional optimizers that use an estimate of the Hessian's diagonal."""
