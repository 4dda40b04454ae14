"""Metadata that ranks exchange before gradients, and the exchange of dense gradients in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from metagrad.core._torch import linalg
from metagrad.core.budget import device_of
from metagrad.core.modules import is_sharded
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


CALL = "average_gradients(params)"
LAYOUTS = ("strided", "sparse COO", "RowSparse", "of another kind")


def joined(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the group, or the default group for None. Return None if it has a single rank."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return None if group is None or group.size() == 1 else group


def named_tensors(params: nn.Module | Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, Tensor]:
    """Return parameters by name, each one once."""
    if isinstance(params, nn.Module):
        named = dict(params.named_parameters())
    elif isinstance(params, Mapping):
        named = {str(name): param for name, param in params.items()}
    else:
        given = [params] if isinstance(params, Tensor) else list(params)
        named = {f"parameter {number}": param for number, param in enumerate(given)}
    for name, param in named.items():
        if not isinstance(param, Tensor):
            raise TypeError(f"{CALL}: {name} must be a tensor, got {type(param).__name__}.")
    first = {id(param): name for name, param in reversed(named.items())}
    return {name: param for name, param in named.items() if first[id(param)] == name}


def _layout_of(gradient: Tensor) -> int:
    """Return the index of a gradient's layout in ``LAYOUTS``."""
    if gradient.requires_grad or is_sharded(gradient):
        return 3
    if isinstance(gradient, RowSparse):
        return 2
    return {torch.strided: 0, torch.sparse_coo: 1}.get(gradient.layout, 3)


def agreed(
    named: Mapping[str, Tensor], weight: float, group: ProcessGroup
) -> tuple[float, dict[str, int | None]]:
    """Exchange weights and layouts of gradients.

    All ranks get the same result. So they raise the same error, or take part in the same collectives.

    Returns:
        The sum of the weights, and the layout of each gradient. None if no rank has this gradient.
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
        raise ValueError(f"{CALL}: weight is 0 in every process, so there is nothing to average.")
    return total, {name: _one_layout(name, each) for name, each in zip(named, counts, strict=True)}


def _one_layout(name: str, counts: list[float]) -> int | None:
    present = [layout for layout, count in enumerate(counts) if count]
    if counts[3]:
        raise ValueError(
            f"{CALL}: the gradient of {name} has a graph (of backward(create_graph=True)), is a DTensor, or is "
            "neither strided, RowSparse nor sparse COO. Take it by loss.backward(), leave out what fully_shard has "
            "averaged, or convert it by .to_sparse_coo()."
        )
    if len(present) > 1:
        described = " and ".join(f"{LAYOUTS[layout]} in {counts[layout]:.0f}" for layout in present)
        raise ValueError(
            f"{CALL}: the gradient of {name} is {described} processes. One of them would become dense: let every "
            "process compute it in the same way, or convert it before."
        )
    return present[0] if present else None


AVERAGED = WeakTensorKeyDictionary()


def note_average(param: Tensor) -> None:
    """Record that the gradient of a parameter is a mean over ranks."""
    if param.grad is not None:
        AVERAGED[param.grad] = True


def is_average(gradient: Tensor | None) -> bool:
    """Return whether a gradient is a mean over ranks."""
    return gradient is not None and gradient in AVERAGED


def weighted_sums(
    tensors: Sequence[Tensor | None], like: Sequence[Tensor], factor: float, limit: int, group: ProcessGroup
) -> list[Tensor]:
    """Return the sums over ranks of tensors times the factor of their rank. All buckets are reduced concurrently.

    Args:
        tensors: Tensors of this rank. None counts as zeros. With a factor of 0, every tensor counts as zeros.
        like: Tensors with the same shapes, dtypes and layouts.
        factor: Factor of this rank.
        limit: Size of a bucket in bytes.
        group: Process group.
    """
    begun = []
    for numbers in buckets_of(like, limit):
        flat = torch.cat([_flat(tensors[n] if factor else None, like[n]) for n in numbers]).mul_(factor)
        begun.append((numbers, flat, dist.all_reduce(flat, group=group, async_op=True)))
    found: dict[int, Tensor] = {}
    for numbers, flat, work in begun:
        assert work is not None
        work.wait()
        pieces = flat.split_with_sizes([like[n].numel() for n in numbers])
        found |= {n: _in_layout(piece, like[n]) for n, piece in zip(numbers, pieces, strict=True)}
    return [found[number] for number in range(len(like))]


def sums_over(group: ProcessGroup, tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums over the ranks of a group. None counts as zeros."""
    return weighted_sums(tensors, like, 1.0, 25 * 2**20, group)


def refuse_differences(group: ProcessGroup | None, what: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise ``ValueError`` on all ranks of a group if tensors differ between ranks by more than rounding errors."""
    if group is None:
        return
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors if t is not None])
    mark = flat @ torch.arange(1, len(flat) + 1, device=flat.device).double().cos()
    ends = torch.stack([mark, -mark, linalg.vector_norm(flat)])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    if bool(ends[0] + ends[1] > 1e-4 * ends[2]):
        raise ValueError(f"{what}: expected the same values on all ranks, got values that differ.")


def buckets_of(tensors: Sequence[Tensor], limit: int) -> list[list[int]]:
    """Return the indices of the tensors in each bucket of one dtype and device, with at most ``limit`` bytes."""
    filled: list[list[int]] = []
    last: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for number, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        bucket, size = last.get(kind, ([], limit))
        if size + tensor.nbytes > limit:
            bucket, size = [], 0
            filled.append(bucket)
        bucket.append(number)
        last[kind] = (bucket, size + tensor.nbytes)
    return filled


def _flat(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(like.numel()) if tensor is None else tensor.reshape(-1)


def _in_layout(flat: Tensor, like: Tensor) -> Tensor:
    whole = flat.view(like.shape)
    return whole if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(whole)
