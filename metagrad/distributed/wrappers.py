"""Modules that torch has wrapped to exchange gradients by themselves."""

from __future__ import annotations

from torch import nn


def refuse_wrapped(call: str, model: object) -> None:
    """Refuse a model whose wrapper would average the wrong gradients.

    The gradients of inner steps and the products of curvature are taken by `torch.autograd.grad`, which the reducer
    of a `DistributedDataParallel` does not see.

    Raises:
        ValueError: It is such a model.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{call}: model is a {type(model).__name__}, which averages what reaches .grad, not what is "
            "differentiated here. Pass the module in it, model.module, take batch.shard(), and call "
            "metagrad.distributed.average_gradients after the backward pass."
        )
