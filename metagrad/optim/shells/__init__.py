"""Optimizers of ``torch.optim``'s kind, made of rules."""
