"""What processes agree on before they exchange gradients: their weights, and which layouts there are."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metagrad.core.modules import is_sharded
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Layout(enum.IntEnum):
    """How a gradient is stored."""

    STRIDED = 0
    COO = 1
    ROW_SPARSE = 2


class Own(NamedTuple):
    """What one process tells the others.

    Attributes:
        weight: Its weight.
        places: The place of each parameter in the order in which their gradients became final.
        again: Which gradients have changed since they were sent.
        failed: Whether an error keeps its gradients out.
    """

    weight: float
    places: Sequence[int] = ()
    again: Collection[int] = ()
    failed: bool = False


class Agreement(NamedTuple):
    """What all processes know.

    Attributes:
        total: The sum of the weights.
        layouts: The layout of each gradient; None where no process has one.
        again: Which gradients some process has changed since it sent them.
        order: The parameters in the order in which their gradients become final, the mean of the processes.
        nbytes: The bytes that it took to agree.
    """

    total: float
    layouts: list[Layout | None]
    again: set[int]
    order: list[int]
    nbytes: int

    def dense(self) -> list[int]:
        """Return the parameters with strided gradients, in their order."""
        return [number for number in self.order if self.layouts[number] is Layout.STRIDED]


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
    if is_sharded(gradient):
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
    """Return a weight as a float, unless it is negative or not finite."""
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"{call}: weight must be a finite number of at least 0, got {weight!r}.")
    return float(weight)


def agree(
    call: str, params: Mapping[str, Tensor], own: Own, device: torch.device, group: ProcessGroup
) -> Agreement:
    """Exchange weights and the layouts of gradients, by tensors on a device.

    Raises:
        ValueError: The weights are all 0, or a gradient has one layout here and another one there, or one that
            cannot be averaged: in all processes, since all have come to know of it.
        RuntimeError: Another process has failed.
    """
    flags, error = torch.zeros(2 + len(params) * _FLAGS, dtype=torch.float64), None
    try:
        flags[2:] = _described(call, params, own)
    except ValueError as refused:
        error = refused
    flags[0], flags[1] = own.weight, own.failed or error is not None
    flags = flags.to(device)
    dist.all_reduce(flags, group=group)
    total, failed, *rest = flags.tolist()
    if error is not None:
        raise error
    if failed and not own.failed:
        raise RuntimeError(
            f"{call}: an error in {failed:.0f} of {group.size()} processes keeps their gradients out; it is raised "
            "there. The gradients here are left as they were."
        )
    if not total and not failed:
        raise ValueError(f"{call}: weight is 0 in every process, so there is nothing to average.")
    of_each = [rest[at : at + _FLAGS] for at in range(0, len(rest), _FLAGS)]
    layouts = [
        _one_layout(call, name, each[: len(Layout)]) for name, each in zip(params, of_each, strict=True)
    ]
    again = {number for number, each in enumerate(of_each) if each[-2]}
    order = sorted(range(len(of_each)), key=lambda number: of_each[number][-1])
    return Agreement(total, layouts, again, order, flags.nbytes)


_FLAGS = len(Layout) + 2


def _described(call: str, params: Mapping[str, Tensor], own: Own) -> Tensor:
    """Return the flags of each parameter: its layout, whether it changed since it was sent, and its place."""
    flags = torch.zeros(len(params), _FLAGS, dtype=torch.float64)
    for number, (name, param) in enumerate(params.items()):
        if param.grad is not None and own.weight and not own.failed:
            flags[number, layout_of(call, name, param.grad)] = 1
    flags[list(own.again), -2] = 1
    if own.places:
        flags[:, -1] = torch.tensor(own.places, dtype=torch.float64)
    return flags.reshape(-1)


def _one_layout(call: str, name: str, counts: list[float]) -> Layout | None:
    present = [layout for layout in Layout if counts[layout]]
    if len(present) > 1:
        described = " and ".join(f"{layout.name} in {counts[layout]:.0f}" for layout in present)
        raise ValueError(
            f"{call}: the gradient of {name} is {described} processes. One of them would become dense: let every "
            "process compute it in the same way, or convert it before."
        )
    return present[0] if present else None
