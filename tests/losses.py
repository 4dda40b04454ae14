"""Losses of models as functions of their parameters."""

from __future__ import annotations

import torch


def loss_of(model, loss_fn):
    """Return ``loss(params, x, y)``; parameters that ``params`` does not hold are the model's own."""
    return lambda params, x, y: loss_fn(torch.func.functional_call(model, params, (x,)), y)
