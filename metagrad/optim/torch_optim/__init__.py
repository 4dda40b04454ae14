"""Functional optimizers as `torch.optim.Optimizer`."""
