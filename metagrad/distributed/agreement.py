"""What processes agree on before they exchange gradients: their weights, and which layouts there are."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Layout(enum.IntEnum):
    """How a gradient is stored."""

    STRIDED = 0
    COO = 1
    ROW_SPARSE = 2


class Agreement(NamedTuple):
    """What all processes know.

    Attributes:
        share: The weight of this process as a share of that of all.
        layouts: The layout of each gradient; None where no process has one.
        nbytes: What it took to agree.
    """

    share: float
    layouts: list[Layout | None]
    nbytes: int


def joined(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group that is meant, None where there is one process alone."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return None if group is None or group.size() == 1 else group


def named_tensors(call: str, params: object) -> dict[str, Tensor]:
    """Return parameters by name: of a module, a mapping, or an iterable of tensors; none twice."""
    if isinstance(params, nn.Module):
        named = dict(params.named_parameters())
    elif isinstance(params, Mapping):
        named = {str(name): param for name, param in params.items()}
    else:
        given = [params] if isinstance(params, Tensor) else list(params)  # type: ignore[reportArgumentType]
        named = {f"parameter {number}": param for number, param in enumerate(given)}
    for name, param in named.items():
        if not isinstance(param, Tensor):
            raise TypeError(f"{call}: {name} must be a tensor, got {type(param).__name__}.")
    first = {id(param): name for name, param in reversed(named.items())}
    return {name: param for name, param in named.items() if first[id(param)] == name}


def layout_of(call: str, name: str, gradient: Tensor) -> Layout:
    """Return how a gradient is stored.

    Raises:
        ValueError: It is stored in another way, is sharded, or has a graph that an average would cut.
    """
    if gradient.requires_grad:
        raise ValueError(
            f"{call}: the gradient of {name} has a graph, of backward(create_graph=True), and an average of it would "
            "have none. Take it by loss.backward()."
        )
    if hasattr(gradient, "device_mesh"):
        raise ValueError(
            f"{call}: the gradient of {name} is a DTensor, which fully_shard has averaged already. Leave it out."
        )
    if isinstance(gradient, RowSparse):
        return Layout.ROW_SPARSE
    if gradient.layout is torch.strided:
        return Layout.STRIDED
    if gradient.layout is torch.sparse_coo:
        return Layout.COO
    raise ValueError(
        f"{call}: the gradient of {name} must be strided, RowSparse or sparse COO, got {gradient.layout}. Convert it "
        "by .to_sparse_coo()."
    )


def checked_weight(call: str, weight: float) -> float:
    """Refuse a weight that is none."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"{call}: weight must be a finite number of at least 0, got {weight!r}.")
    return float(weight)


def agree(
    call: str, params: Mapping[str, Tensor], weight: float, device: torch.device, group: ProcessGroup
) -> Agreement:
    """Exchange weights and the layouts of gradients, by tensors on a device.

    Raises:
        ValueError: The weights are all 0, or a gradient has one layout here and another one there.
    """
    flags = torch.zeros(1 + len(params) * len(Layout), dtype=torch.float64)
    flags[0] = weight
    for number, (name, param) in enumerate(params.items()):
        if param.grad is not None and weight:
            flags[1 + number * len(Layout) + layout_of(call, name, param.grad)] = 1
    flags = flags.to(device)
    dist.all_reduce(flags, group=group)
    total, *counts = flags.tolist()
    if not total:
        raise ValueError(f"{call}: weight is 0 in every process, so there is nothing to average.")
    found = [
        _one_layout(call, name, counts[number * len(Layout) : (number + 1) * len(Layout)])
        for number, name in enumerate(params)
    ]
    return Agreement(weight / total, found, flags.nbytes)


def _one_layout(call: str, name: str, counts: list[float]) -> Layout | None:
    present = [layout for layout in Layout if counts[layout]]
    if len(present) > 1:
        described = " and ".join(f"{layout.name} in {counts[layout]:.0f}" for layout in present)
        raise ValueError(
            f"{call}: the gradient of {name} is {described} processes. One of them would become dense: let every "
            "process compute it in the same way, or convert it before."
        )
    return present[0] if present else None
