"""The rulebook of a sparse convolution: which site meets which at each position of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from metagrad.core._torch import to_list
from metagrad.core.checks import is_a, is_integer
from metagrad.sparse.checks import INDEX_DTYPES, MAX_CELLS

_CALL = "Rulebook(coords, kernel_size, dilation)"


class Rulebook:
    """The pairs of sites that lie one kernel offset apart, found once and shared by all layers on these sites.

    The grid has no border: coordinates may be any integers, and whatever is not a site is zero. The offsets of an
    odd kernel come in mirrored pairs, so only the first half of them is stored.

    Args:
        coords: int64 [sites, 1 + d]: the number of the example, then d coordinates, in the order of the kernel's
            dimensions (height, width of an image). No site twice, in any order.
        kernel_size: Sites along each dimension of the kernel, odd; one number for all.
        dilation: Steps between the kernel's sites; one number for all dimensions, or d of them.

    Attributes:
        pairs: For each kernel position before the middle one, row by row: the sites, and for each of them its
            neighbour in that direction.

    Raises:
        ValueError: A site is given twice, coordinates are of another shape or too far apart to be numbered, the
            kernel is even, or sizes are not positive or not d.
        TypeError: Coordinates or sizes are not integers.

    Example:
        >>> coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]])
        >>> rulebook = metagrad.sparse.Rulebook(coords, 3)
        >>> rulebook
        Rulebook(sites=3, kernel_size=(3, 3), dilation=(1, 1), pairs=5)
        >>> rulebook.pairs[3]  # site 1 has site 0 on its left
        (tensor([1]), tensor([0]))

    References:
        Graham, van der Maaten, "Submanifold sparse convolutional networks", arXiv:1706.01307, section 3.
    """

    def __init__(
        self, coords: Tensor, kernel_size: int | Sequence[int], *, dilation: int | Sequence[int] = 1
    ) -> None:
        _check_coords(coords)
        num_dims = coords.shape[1] - 1
        self.coords = coords.detach().long()
        self.kernel_size = _sizes("kernel_size", kernel_size, num_dims)
        self.dilation = _sizes("dilation", dilation, num_dims)
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(
                f"{_CALL}: kernel_size must be odd, got {self.kernel_size}: an even kernel has no middle, so its "
                "output would be on other sites."
            )
        self.pairs = _find_pairs(self.coords, _first_offsets(self.kernel_size, self.dilation))

    @property
    def num_sites(self) -> int:
        """How many sites there are."""
        return self.coords.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the sites."""
        return self.coords.device

    def routes(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return for each kernel position the sites of the output and of the input; None is each with itself."""
        return [*self.pairs, None, *((there, here) for here, there in reversed(self.pairs))]

    @property
    def num_pairs(self) -> int:
        """Products of a site's features with a kernel position's matrix: each site with itself, and both ways."""
        return self.num_sites + 2 * sum(len(sites) for sites, _ in self.pairs)

    def __repr__(self) -> str:
        return (
            f"Rulebook(sites={self.num_sites}, kernel_size={self.kernel_size}, dilation={self.dilation}, "
            f"pairs={self.num_pairs})"
        )


def _first_offsets(kernel_size: tuple[int, ...], dilation: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List the steps to the kernel positions before the middle one; position -1 - i is the mirror of i."""
    steps = [
        range(-(size // 2) * apart, size // 2 * apart + 1, apart)
        for size, apart in zip(kernel_size, dilation, strict=True)
    ]
    offsets = list(product(*steps))
    return offsets[: len(offsets) // 2]


def _find_pairs(coords: Tensor, offsets: list[tuple[int, ...]]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Find the sites that have a neighbour at each offset, by sorting and searching their numbers."""
    if not len(coords):
        return ((coords.new_zeros(0), coords.new_zeros(0)),) * len(offsets)
    # Every line is padded by the reach of the kernel, so that a step beyond its end does not land on the next one.
    reach = [max((abs(offset[d]) for offset in offsets), default=0) for d in range(coords.shape[1] - 1)]
    keys, strides = _numbered(coords, reach)
    keys, order = torch.sort(keys)
    _check_distinct(keys, order, coords)
    found: list[tuple[Tensor, Tensor]] = []
    for offset in offsets:
        wanted = keys + sum(step * stride for step, stride in zip(offset, strides[1:], strict=True))
        place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
        hit = (keys[place] == wanted).nonzero().squeeze(1)
        found.append((order[hit], order[place[hit]]))
    return tuple(found)


def _numbered(coords: Tensor, reach: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Number the sites row by row in the box around them, whose lines are ``reach`` cells longer."""
    lowest = coords.amin(0)
    spans = [
        int(high) - int(low) + 1 + extra
        for low, high, extra in zip(to_list(lowest), to_list(coords.amax(0)), [0, *reach], strict=True)
    ]
    strides = _strides(spans)
    return ((coords - lowest) * coords.new_tensor(strides)).sum(1), strides


def _strides(spans: list[int]) -> list[int]:
    strides = [1]
    for span in reversed(spans):
        strides.insert(0, strides[0] * span)
    if strides[0] > MAX_CELLS:
        raise ValueError(
            f"{_CALL}: the box around the sites has {' x '.join(map(str, spans))} cells, more than 2^63 - 1, "
            "which int64 cannot number. Check the coordinates, or split the sites into examples that are near "
            "each other."
        )
    return strides[1:]


def _check_distinct(keys: Tensor, order: Tensor, coords: Tensor) -> None:
    same = (keys[1:] == keys[:-1]).nonzero()
    if len(same):
        at = int(same[0])
        first, second = sorted((int(order[at]), int(order[at + 1])))
        raise ValueError(
            f"{_CALL}: every site must be given once, but rows {first} and {second} are both "
            f"{to_list(coords[first])}. coords.unique(dim=0, return_inverse=True) merges them; add their features "
            "by segment_sum."
        )


def _check_coords(coords: Tensor) -> None:
    if not is_a(coords, Tensor):
        raise TypeError(f"{_CALL}: coords must be a tensor of integers, got {type(coords).__name__}.")
    if coords.dtype not in INDEX_DTYPES:
        raise TypeError(f"{_CALL}: coords must be integers (int64), got {coords.dtype}.")
    if coords.ndim != 2 or coords.shape[1] < 2:
        raise ValueError(
            f"{_CALL}: coords must be [sites, 1 + d], the number of the example and d coordinates, "
            f"got {list(coords.shape)}."
        )


def _sizes(name: str, given: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, Sequence) else (given,) * num_dims
    if not all(is_integer(size) for size in sizes):
        raise TypeError(f"{_CALL}: {name} must be an int or a sequence of them, got {given!r}.")
    if len(sizes) != num_dims:
        raise ValueError(
            f"{_CALL}: coords have {num_dims} dimensions beside the number of the example, so {name} must be one "
            f"number or {num_dims}, got {given!r}."
        )
    if min(sizes) < 1:
        raise ValueError(f"{_CALL}: {name} must be at least 1, got {given!r}.")
    return sizes
