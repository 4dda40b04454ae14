"""Gradients and buffers, averaged over the processes of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metagrad.core.budget import Bytes, checked_bytes, device_of
from metagrad.core.checks import check_number
from metagrad.core.modules import is_sharded
from metagrad.distributed import rows
from metagrad.distributed.buckets import weighted_sums
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CALL = "average_gradients(params)"
LAYOUTS = ("strided", "sparse COO", "RowSparse", "of another kind")


class Traffic(NamedTuple):
    r"""The bytes that one process hands over, and sends, in an average over N processes.

    A ring all-reduce of b bytes sends :math:`2 b (N - 1) / N` from each process, a ring all-gather of b bytes from
    each sends :math:`b (N - 1)`.

    Attributes:
        processes: The number N.
        reduced: Bytes that are all-reduced: strided tensors, weights and layouts.
        gathered: Bytes that are all-gathered: rows, their values and how many there are. A process with fewer rows
            than another one pads them.

    Example:
        >>> metagrad.distributed.Traffic(processes=4, reduced=1000, gathered=10).sent
        1530

    References:
        Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """

    processes: int
    reduced: int = 0
    gathered: int = 0

    @property
    def sent(self) -> int:
        """Bytes that this process sends."""
        return 2 * self.reduced * (self.processes - 1) // self.processes + self.gathered * (
            self.processes - 1
        )


@torch.no_grad()
def average_gradients(
    params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor],
    *,
    weight: float = 1.0,
    bucket: Bytes = "25MiB",
    group: ProcessGroup | None = None,
) -> Traffic:
    r"""Replace the gradient of each parameter by its mean over the processes of a group.

    .. math:: g \leftarrow \frac{\sum_r w_r g_r}{\sum_r w_r}

    With the number of tasks (of examples) of each process as its weight this is the gradient of the mean over all of
    them, exactly, however unequal the shares are. Strided gradients are put into flat buckets by dtype and device, an
    all-reduce each, which run at the same time. Of row-sparse gradients (:class:`~metagrad.sparse.RowSparse`, sparse
    COO) rows and values are gathered, and the result is row-sparse again: what is sent depends on the rows that are
    touched, not on the table. Afterwards the gradients have the same bits in every process.

    All processes call it with the same parameters in the same order. A parameter without a gradient in some of them
    has zeros there; without one in any it keeps none. Parameters are not compared: let all processes begin with the
    same ones, by the same seed. Without a process group, or in one of a single process, nothing changes.

    Args:
        params: A module, whose parameters are meant (learned hyper-parameters of an algorithm among them), a mapping,
            or an iterable of tensors.
        weight: The weight of this process: the number of tasks in its share; 0 leaves its gradients out.
        bucket: How many bytes are reduced at once.
        group: The processes; None is the default group.

    Returns:
        The bytes that it took.

    Raises:
        ValueError: ``weight`` is negative or not finite, or 0 in every process. A gradient has a graph, is sharded,
            or has one layout in some processes and another one elsewhere. All processes raise the error.
        TypeError: A parameter is no tensor.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.ones(4, 2)).square().mean().backward()
        >>> metagrad.distributed.average_gradients(model, weight=4).processes
        1

    References:
        Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020, section 3.2
        (buckets).
    """
    named, limit = _named_tensors(params), checked_bytes(_CALL, "bucket", bucket)
    weight, group = check_number(f"{_CALL}: weight", weight, least=0), _joined(group)
    if group is None or not named:
        return Traffic(1 if group is None else group.size())
    total, layouts = _agreed(named, weight, group)
    share = weight / total
    dense = [param for name, param in named.items() if layouts[name] == 0]
    tables = {name: param for name, param in named.items() if layouts[name] in (1, 2)}
    gathered = rows.average(_CALL, tables, share, group)
    for param, mean in zip(
        dense, weighted_sums([p.grad for p in dense], dense, share, limit, group), strict=True
    ):
        param.grad = mean
    for name, param in named.items():
        if layouts[name] is None:  # of a process with weight 0
            param.grad = None
        elif layouts[name] == 1 and param.grad is not None:
            param.grad = param.grad.to_coo()  # type: ignore[reportAttributeAccessIssue]
    reduced = sum(param.nbytes for param in dense) + 8 * (1 + len(LAYOUTS) * len(named))
    return Traffic(group.size(), reduced, gathered)


@torch.no_grad()
def average_buffers(module: nn.Module, *, weight: float = 1.0, group: ProcessGroup | None = None) -> None:
    r"""Replace each floating-point buffer by its mean over the processes of a group.

    With the numbers of tasks as weights, running statistics that move towards the mean over tasks, once for each
    meta-batch, become the running statistics of the whole meta-batch: ``norm=`` of :class:`metagrad.MAML` moves them
    so. Statistics that layers move by themselves, task by task, become the mean over the processes. Buffers of
    integers, such as counters, do not change.

    Args:
        module: The module with the buffers, which are averaged in place.
        weight: The weight of this process: the number of tasks in its share.
        group: The processes; None is the default group.

    Raises:
        ValueError: ``weight`` is negative or not finite, or 0 in every process.

    Example:
        >>> metagrad.distributed.average_buffers(torch.nn.BatchNorm1d(3))  # one process: nothing changes
    """
    weight = check_number("average_buffers(module, weight)", weight, least=0)
    found = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    if (group := _joined(group)) is None or not found:
        return
    total, _ = _agreed({"": found[0].detach()}, weight, group)
    limit = checked_bytes("average_buffers(module)", "bucket", "25MiB")
    for buffer, mean in zip(found, weighted_sums(found, found, weight / total, limit, group), strict=True):
        buffer.copy_(mean)


def _joined(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group that is meant, None where there is only one process."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return None if group is None or group.size() == 1 else group


def _named_tensors(params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, Tensor]:
    """Return parameters by name: of a module, a mapping, or an iterable of tensors; none twice."""
    if isinstance(params, nn.Module):
        named = dict(params.named_parameters())
    elif isinstance(params, Mapping):
        named = {str(name): param for name, param in params.items()}
    else:
        given = [params] if isinstance(params, Tensor) else list(params)
        named = {f"parameter {number}": param for number, param in enumerate(given)}
    for name, param in named.items():
        if not isinstance(param, Tensor):
            raise TypeError(f"{_CALL}: {name} must be a tensor, got {type(param).__name__}.")
    first = {id(param): name for name, param in reversed(named.items())}
    return {name: param for name, param in named.items() if first[id(param)] == name}


def _layout_of(gradient: Tensor) -> int:
    """Return the number of the layout of a gradient."""
    if gradient.requires_grad or is_sharded(gradient):
        return 3
    if isinstance(gradient, RowSparse):
        return 2
    return {torch.strided: 0, torch.sparse_coo: 1}.get(gradient.layout, 3)


def _agreed(
    named: Mapping[str, Tensor], weight: float, group: ProcessGroup
) -> tuple[float, dict[str, int | None]]:
    """Exchange weights and layouts; return the sum of the weights, and the layout of each gradient if there is one.

    Every process learns what all have, so that all raise the same error, and take part in the same exchanges.
    """
    flags = torch.zeros(1 + len(named), len(LAYOUTS), dtype=torch.float64)
    flags[0, 0] = weight
    for number, param in enumerate(named.values(), 1):
        if param.grad is not None and weight:
            flags[number, _layout_of(param.grad)] = 1
    flags = flags.to(device_of(list(named.values())))
    dist.all_reduce(flags, group=group)
    (total, *_), *counts = flags.tolist()
    if not total:
        raise ValueError(f"{_CALL}: weight is 0 in every process, so there is nothing to average.")
    return total, {name: _one_layout(name, each) for name, each in zip(named, counts, strict=True)}


def _one_layout(name: str, counts: list[float]) -> int | None:
    present = [layout for layout, count in enumerate(counts) if count]
    if counts[3]:
        raise ValueError(
            f"{_CALL}: the gradient of {name} has a graph (of backward(create_graph=True)), is a DTensor, or is "
            "neither strided, RowSparse nor sparse COO. Take it by loss.backward(), leave out what fully_shard has "
            "averaged, or convert it by .to_sparse_coo()."
        )
    if len(present) > 1:
        described = " and ".join(f"{LAYOUTS[layout]} in {counts[layout]:.0f}" for layout in present)
        raise ValueError(
            f"{_CALL}: the gradient of {name} is {described} processes. One of them would become dense: let every "
            "process compute it in the same way, or convert it before."
        )
    return present[0] if present else None
