"""Shared work: each process computes some of the results, and then all have all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from metagrad.distributed.sums import alike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FAILED = torch.linalg.LinAlgError  # type: ignore[reportPrivateImportUsage]


def shares(costs: Sequence[float], size: int) -> list[list[int]]:
    """Assign items to processes: the most expensive first, each to the process with the least to do so far.

    References:
        Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied Mathematics 17(2), 1969: at most
        4/3 of the best there is.

    Example:
        >>> from metagrad.distributed.shares import shares
        >>> shares([1.0, 8.0, 3.0, 4.0], 2)
        [[1], [3, 2, 0]]
    """
    parts: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        least = loads.index(min(loads))
        parts[least].append(number)
        loads[least] += costs[number]
    return parts


def of_matrices(
    call: str,
    compute: Callable[[list[int]], Sequence[Tensor]],
    matrices: Sequence[Tensor],
    group: ProcessGroup,
) -> list[Tensor]:
    """Compute a matrix for each of some, which are the same in all processes, in shares by the cube of their sizes.

    All processes have the same bits. One all-gather for each dtype and device is filled up to the largest share.

    Args:
        call: In errors.
        compute: Numbers to results, of the shapes of the matrices.
        matrices: Each ``[..., n, n]``.
        group: The processes.

    Raises:
        ValueError: There is a graph, which no process would have of the others' results.
        torch.linalg.LinAlgError: A matrix could not be factorised, here or in another process: in all of them.
    """
    if torch.is_grad_enabled() and any(matrix.requires_grad for matrix in matrices):
        raise ValueError(
            f"{call}: what other processes compute has no graph here. Take steps under torch.no_grad()."
        )
    parts = shares([float(m.numel() * m.shape[-1]) for m in matrices], group.size())
    mine, error = parts[group.rank()], None
    try:
        found = dict(zip(mine, compute(mine), strict=True))
    except _FAILED as failure:
        found, error = {number: torch.zeros_like(matrices[number]) for number in mine}, failure
    results: dict[int, Tensor] = {}
    failed = set()
    for numbers in alike(matrices):
        own = [[n for n in part if n in numbers] for part in parts]
        gathered = _gathered(own, found, matrices, error is not None, group)
        failed |= {rank for rank, (flag, _) in enumerate(gathered) if flag}
        results |= {n: result for _, of_process in gathered for n, result in of_process.items()}
    if failed:
        raise error or _FAILED(
            f"{call}: a matrix could not be factorised in process {min(failed)} of the group, whose error says more."
        )
    return [results[number] for number in range(len(matrices))]


def _gathered(
    parts: Sequence[Sequence[int]],
    found: dict[int, Tensor],
    like: Sequence[Tensor],
    failed: bool,
    group: ProcessGroup,
) -> list[tuple[bool, dict[int, Tensor]]]:
    """Return what each process has found, and whether it has failed, which goes first."""
    sizes = [[like[n].numel() for n in part] for part in parts]
    first = like[next(n for part in parts for n in part)]
    flat = first.new_zeros(1 + max(map(sum, sizes)))
    flat[0] = failed
    rank = group.rank()
    if parts[rank]:
        torch.cat([found[n].reshape(-1) for n in parts[rank]], out=flat[1 : 1 + sum(sizes[rank])])
    everyone = [torch.empty_like(flat) for _ in parts]
    dist.all_gather(everyone, flat, group=group)
    return [
        (bool(own[0]), _split(own[1:], {n: like[n] for n in part}))
        for part, own in zip(parts, everyone, strict=True)
    ]


def _split(flat: Tensor, like: Mapping[int, Tensor]) -> dict[int, Tensor]:
    sizes = [matrix.numel() for matrix in like.values()]
    pieces = flat[: sum(sizes)].split_with_sizes(sizes)
    return {n: piece.view(matrix.shape) for (n, matrix), piece in zip(like.items(), pieces, strict=True)}
