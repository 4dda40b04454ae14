"""Optimizers: pure rules, for inner loops that are differentiated through."""

from metagrad.optim import rules

__all__ = ["rules"]
