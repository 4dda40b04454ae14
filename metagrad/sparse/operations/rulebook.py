"""Rulebooks of sparse convolutions: which site meets which at each position of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from metagrad.core._torch import distinct_and_places, to_list
from metagrad.core.checks import is_a, is_integer
from metagrad.sparse.checks import INDEX_DTYPES, MAX_CELLS

_RULEBOOK = "Rulebook(coords, kernel_size, dilation)"
_STRIDED = "StridedRulebook(coords, kernel_size, stride)"


class Routes:
    """Which sites meet at each position of a kernel: what a convolution asks of a rulebook."""

    coords: Tensor
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    pairs: tuple[tuple[Tensor, Tensor], ...]

    @property
    def num_sites(self) -> int:
        """Sites of the input."""
        return self.coords.shape[0]

    @property
    def num_outputs(self) -> int:
        """Sites of the output; those of the input, unless there is a stride."""
        return self.num_sites

    @property
    def device(self) -> torch.device:
        """Where the sites are."""
        return self.coords.device

    def routes(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return for each kernel position the sites of the output and of the input; None is each with itself."""
        return list(self.pairs)


class Rulebook(Routes):
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
        _check_coords(_RULEBOOK, coords)
        num_dims = coords.shape[1] - 1
        self.coords = coords.detach().long()
        self.kernel_size = _sizes(_RULEBOOK, "kernel_size", kernel_size, num_dims)
        self.dilation = _sizes(_RULEBOOK, "dilation", dilation, num_dims)
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(
                f"{_RULEBOOK}: kernel_size must be odd, got {self.kernel_size}: an even kernel has no middle, so its "
                "output would be on other sites. StridedRulebook takes any."
            )
        self.pairs = _find_pairs(self.coords, _first_offsets(self.kernel_size, self.dilation))

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


class StridedRulebook(Routes):
    r"""The pairs of sites that a convolution with a stride joins; its output is on other, mostly fewer sites.

    .. math:: \mathrm{out} = \{q : \exists\, 0 \le o < \mathrm{kernel\_size},\;
        q \cdot \mathrm{stride} - \mathrm{padding} + o \cdot \mathrm{dilation} \text{ is a site}\}

    These are the sites at which the dense convolution of the grid is anything but its bias. A kernel of the size of
    the stride, without padding, pools: each site is in one cell of the output.

    Args:
        coords: int64 [sites, 1 + d], as of :class:`Rulebook`.
        kernel_size: Sites along each dimension of the kernel, odd or even; one number for all.
        stride: Steps between outputs; one number for all dimensions, or d of them.
        padding: By how much the first output reaches before the origin.
        dilation: Steps between the kernel's sites.
        grid: The size of the grid, one number for all dimensions, or d of them: outputs are left out where torch's
            convolution has none, and coordinates count from 0. None is a grid without border.

    Attributes:
        out_coords: int64 [outputs, 1 + d], ascending: the sites of the output, for the next rulebook.
        out_grid: The size of the output's grid, None without border.
        pairs: For each kernel position, row by row: the sites of the output, and of the input for each of them.

    Raises:
        ValueError: A site is given twice or is outside of the grid, coordinates are of another shape or too far apart
            to be numbered, or sizes are out of range or not d.
        TypeError: Coordinates or sizes are not integers.

    Example:
        >>> coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]])
        >>> rulebook = metagrad.sparse.StridedRulebook(coords, 2, 2)
        >>> rulebook.out_coords.tolist()
        [[0, 0, 0], [0, 2, 2]]
        >>> metagrad.sparse.conv(torch.tensor([[1.0], [2.0], [4.0]]), torch.ones(1, 1, 2, 2), rulebook).tolist()
        [[3.0], [4.0]]

    References:
        Graham, van der Maaten, "Submanifold sparse convolutional networks", arXiv:1706.01307, section 2: the
        convolution SC, beside the submanifold one.
    """

    out_coords: Tensor
    out_grid: tuple[int, ...] | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def __init__(
        self,
        coords: Tensor,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        *,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        grid: int | Sequence[int] | None = None,
    ) -> None:
        _check_coords(_STRIDED, coords)
        num_dims = coords.shape[1] - 1
        self.coords = coords.detach().long()
        self.kernel_size = _sizes(_STRIDED, "kernel_size", kernel_size, num_dims)
        self.stride = _sizes(_STRIDED, "stride", stride, num_dims)
        self.padding = _sizes(_STRIDED, "padding", padding, num_dims, least=0)
        self.dilation = _sizes(_STRIDED, "dilation", dilation, num_dims)
        self.out_grid = None if grid is None else self._out_grid(_sizes(_STRIDED, "grid", grid, num_dims))
        if len(coords):
            keys, order = torch.sort(_numbered(_STRIDED, self.coords)[0])
            _check_distinct(_STRIDED, keys, order, self.coords)
        self.out_coords, self.pairs = self._joined()

    @property
    def num_outputs(self) -> int:
        """Sites of the output."""
        return self.out_coords.shape[0]

    @property
    def num_pairs(self) -> int:
        """Products of a site's features with a kernel position's matrix."""
        return sum(len(sites) for _, sites in self.pairs)

    def __repr__(self) -> str:
        return (
            f"StridedRulebook(sites={self.num_sites}, outputs={self.num_outputs}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, pairs={self.num_pairs})"
        )

    def _out_grid(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of the output's grid, as torch's convolution has it."""
        places = self.coords[:, 1:]
        if bool(((places < 0) | (places >= places.new_tensor(grid))).any()):
            raise ValueError(
                f"{_STRIDED}: coordinates must be inside of the grid, from 0 on and below {grid}."
            )
        settings = zip(grid, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        size = tuple((n + 2 * pad - apart * (k - 1) - 1) // step + 1 for n, k, step, pad, apart in settings)
        if min(size) < 1:
            raise ValueError(
                f"{_STRIDED}: the kernel must fit into the padded grid, got kernel_size {self.kernel_size} with "
                f"dilation {self.dilation}, grid {grid} and padding {self.padding}. Give more padding."
            )
        return size

    def _joined(self) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """Find the sites of the output, and the pairs at each kernel position."""
        found = [self._reached(position) for position in product(*map(range, self.kernel_size))]
        every = torch.cat([outputs for outputs, _ in found])
        if not len(every):
            return every, tuple((sites, sites) for _, sites in found)
        keys, place = distinct_and_places(_numbered(_STRIDED, every)[0])
        coords = every.new_empty(len(keys), every.shape[1]).index_copy_(0, place, every)
        sizes = [len(sites) for _, sites in found]
        return coords, tuple(
            (outputs, sites) for outputs, (_, sites) in zip(place.split_with_sizes(sizes), found, strict=True)
        )

    def _reached(self, position: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the outputs, [pairs, 1 + d], that sites reach at a kernel position, and these sites."""
        stride, padding, dilation, o = map(
            self.coords.new_tensor, (self.stride, self.padding, self.dilation, position)
        )
        scaled = self.coords[:, 1:] + padding - o * dilation
        outputs = scaled.div(stride, rounding_mode="floor")
        is_met = (outputs * stride == scaled).all(1)
        if self.out_grid is not None:
            is_met &= ((outputs >= 0) & (outputs < outputs.new_tensor(self.out_grid))).all(1)
        sites = is_met.nonzero().squeeze(1)
        return torch.cat([self.coords[sites, :1], outputs[sites]], 1), sites


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
    keys, strides = _numbered(_RULEBOOK, coords, reach)
    keys, order = torch.sort(keys)
    _check_distinct(_RULEBOOK, keys, order, coords)
    found: list[tuple[Tensor, Tensor]] = []
    for offset in offsets:
        wanted = keys + sum(step * stride for step, stride in zip(offset, strides[1:], strict=True))
        place = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
        hit = (keys[place] == wanted).nonzero().squeeze(1)
        found.append((order[hit], order[place[hit]]))
    return tuple(found)


def _numbered(call: str, coords: Tensor, reach: Sequence[int] = ()) -> tuple[Tensor, list[int]]:
    """Number the sites row by row in the box around them, whose lines are ``reach`` cells longer."""
    lowest = coords.amin(0)
    more = [0, *(reach or [0] * (coords.shape[1] - 1))]
    spans = [
        int(high) - int(low) + 1 + extra
        for low, high, extra in zip(to_list(lowest), to_list(coords.amax(0)), more, strict=True)
    ]
    strides = _strides(call, spans)
    return ((coords - lowest) * coords.new_tensor(strides)).sum(1), strides


def _strides(call: str, spans: list[int]) -> list[int]:
    strides = [1]
    for span in reversed(spans):
        strides.insert(0, strides[0] * span)
    if strides[0] > MAX_CELLS:
        raise ValueError(
            f"{call}: the box around the sites has {' x '.join(map(str, spans))} cells, more than 2^63 - 1, "
            "which int64 cannot number. Check the coordinates, or split the sites into examples that are near "
            "each other."
        )
    return strides[1:]


def _check_distinct(call: str, keys: Tensor, order: Tensor, coords: Tensor) -> None:
    same = (keys[1:] == keys[:-1]).nonzero()
    if len(same):
        at = int(same[0])
        first, second = sorted((int(order[at]), int(order[at + 1])))
        raise ValueError(
            f"{call}: every site must be given once, but rows {first} and {second} are both "
            f"{to_list(coords[first])}. coords.unique(dim=0, return_inverse=True) merges them; add their features "
            "by segment_sum."
        )


def _check_coords(call: str, coords: Tensor) -> None:
    if not is_a(coords, Tensor):
        raise TypeError(f"{call}: coords must be a tensor of integers, got {type(coords).__name__}.")
    if coords.dtype not in INDEX_DTYPES:
        raise TypeError(f"{call}: coords must be integers (int64), got {coords.dtype}.")
    if coords.ndim != 2 or coords.shape[1] < 2:
        raise ValueError(
            f"{call}: coords must be [sites, 1 + d], the number of the example and d coordinates, "
            f"got {list(coords.shape)}."
        )


def _sizes(
    call: str, name: str, given: int | Sequence[int], num_dims: int, least: int = 1
) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, Sequence) else (given,) * num_dims
    if not all(is_integer(size) for size in sizes):
        raise TypeError(f"{call}: {name} must be an int or a sequence of them, got {given!r}.")
    if len(sizes) != num_dims:
        raise ValueError(
            f"{call}: coords have {num_dims} dimensions beside the number of the example, so {name} must be one "
            f"number or {num_dims}, got {given!r}."
        )
    if min(sizes) < least:
        raise ValueError(f"{call}: {name} must be at least {least}, got {given!r}.")
    return sizes
