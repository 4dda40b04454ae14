"""Sums over the processes of a group, of what has the same shape in all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ADVICE = "Give every process the same seed, or send it from one of them by torch.distributed.broadcast."


def sums(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Add tensors up over processes, in one all-reduce for each dtype and device; without a graph."""
    found: dict[int, Tensor] = {}
    for numbers in alike(tensors):
        flat = torch.cat([tensors[n].detach().reshape(-1) for n in numbers])
        dist.all_reduce(flat, group=group)
        pieces = flat.split_with_sizes([tensors[n].numel() for n in numbers])
        found |= {n: piece.view(tensors[n].shape) for n, piece in zip(numbers, pieces, strict=True)}
    return [found[number] for number in range(len(tensors))]


def alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Put tensors of one dtype and device together, in their order; return their numbers."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        kinds[tensor.dtype, tensor.device].append(number)
    return list(kinds.values())


def unions(numbers: Mapping[str, Tensor], device: torch.device, group: ProcessGroup) -> dict[str, Tensor]:
    """Return by name the numbers that any process has, ascending; some processes may not have some names."""
    everyone: list[Mapping[str, Tensor]] = [{}] * group.size()
    dist.all_gather_object(everyone, {name: found.cpu() for name, found in numbers.items()}, group=group)
    names = dict.fromkeys(name for of_process in everyone for name in of_process)
    return {
        name: torch.cat([found[name] for found in everyone if name in found]).unique().to(device)
        for name in names
    }


def refuse_different(
    call: str, name: str, tensor: Tensor, group: ProcessGroup, *, advice: str = _ADVICE
) -> None:
    """Refuse a tensor that is not the same in all processes, to rounding.

    Raises:
        ValueError: It is another one in some process.
    """
    own = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64, device=tensor.device)
    mark = (own * tensor.detach().reshape(-1).double()).sum()
    marks = [torch.empty_like(mark) for _ in range(group.size())]
    dist.all_gather(marks, mark, group=group)
    if not torch.allclose(torch.stack(marks), marks[0], rtol=1e-6, atol=0.0):
        raise ValueError(f"{call}: {name} must be the same in all processes of the group. {advice}")


def everywhere(flag: bool, device: torch.device, group: ProcessGroup) -> bool:
    """Say whether a flag is set in all processes."""
    least = torch.tensor(int(flag), device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return bool(least)
