"""Optimizers that use curvature. Each is a ``torch.optim.Optimizer`` in one file."""
