"""Losses of models as functions of their parameters."""

import torch


def loss_of(model, loss_fn):
    """Return ``loss(params, x, y)``. Parameters that are missing from ``params`` come from the model."""
    return lambda params, x, y: loss_fn(torch.func.functional_call(model, params, (x,)), y)
