"""Optimizers that use curvature; each is a ``torch.optim.Optimizer`` in one file."""
