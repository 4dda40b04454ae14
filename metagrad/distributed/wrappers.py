"""Modules that torch has wrapped to exchange gradients or parameters by themselves."""

from __future__ import annotations

from torch import nn


def refuse_wrapped(call: str, model: object) -> None:
    """Refuse a model whose wrapper would average the wrong gradients, or whose parameters are in pieces.

    The gradients of inner steps and the products of curvature are taken by `torch.autograd.grad`, which the reducer
    of a `DistributedDataParallel` does not see, and a sharded parameter cannot be replaced by an adapted one.

    Raises:
        ValueError: It is such a model.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{call}: model is a {type(model).__name__}, which averages what reaches .grad, not what is "
            "differentiated here. Pass the module in it, model.module, take batch.shard(), and call "
            "metagrad.distributed.average_gradients after the backward pass."
        )
    if isinstance(model, nn.Module):
        sharded = [name for name, param in model.named_parameters() if hasattr(param, "device_mesh")]
        if sharded:
            raise ValueError(
                f"{call}: the parameter {sharded[0]} is a DTensor, as fully_shard makes them, and cannot be replaced "
                "by an adapted one. Pass the model as it is before fully_shard, take batch.shard(), and call "
                "metagrad.distributed.average_gradients after the backward pass."
            )
