"""Sums over the processes of a group, of what has the same shape in all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ADVICE = "Give every process the same seed, or send it from one of them by torch.distributed.broadcast."


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
