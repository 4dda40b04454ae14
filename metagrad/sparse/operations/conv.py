r"""Submanifold sparse convolution, as a family of rules closed under differentiation.

The convolution is linear in features and in weights. Its derivative with respect to the features is the convolution
with the mirrored kernel and its channels exchanged. The derivative with respect to the weights is
:class:`_Correlate`, whose own derivatives are convolutions. Only features and weights are saved for
derivatives. Features of pairs are gathered for one kernel position at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import Context, VmapInfo, to_list
from metagrad.core.checks import check_type, is_integer
from metagrad.core.tree import widened
from metagrad.sparse.checks import MAX_CELLS, check_device, check_floating, check_integers, check_same
from metagrad.sparse.kernels.derivatives import Bilinear

_RULEBOOK = "Rulebook(coords, kernel_size, dilation)"


class Rulebook:
    """The pairs of sites that lie one kernel offset apart, found once and shared by all layers on these sites.

    The grid has no border: coordinates may be any integers, and all cells that are not sites are zero. The offsets of
    an odd kernel come in mirrored pairs, so only the first half of them is stored.

    Args:
        coords: Number of the example and d coordinates of each site, int64 [sites, 1 + d]. The coordinates are in the
            order of the dimensions of the kernel (height, width of an image). Sites are distinct, in any order.
        kernel_size: Odd size of the kernel, one int or d ints.
        dilation: Distance between neighboring sites of the kernel, one int or d ints.

    Attributes:
        pairs: Sites and their neighbors, for each kernel position before the middle, row by row.

    Raises:
        ValueError: A site occurs twice, coordinates have a wrong shape or are too far apart, or a size is wrong.
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
                f"{_RULEBOOK}: kernel_size must be odd, got {self.kernel_size}: an even kernel has no middle, so its "
                "output would be on other sites."
            )
        self.pairs = _find_pairs(self.coords, _first_offsets(self.kernel_size, self.dilation))

    @property
    def num_sites(self) -> int:
        """Number of sites."""
        return self.coords.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the sites."""
        return self.coords.device

    def routes(self) -> list[tuple[Tensor, Tensor] | None]:
        """Return the output and input sites of each kernel position. None pairs each site with itself."""
        return [*self.pairs, None, *((there, here) for here, there in reversed(self.pairs))]

    @property
    def num_pairs(self) -> int:
        """Number of products of a site's features with the matrix of a kernel position."""
        return self.num_sites + 2 * sum(len(sites) for sites, _ in self.pairs)

    def __repr__(self) -> str:
        return (
            f"Rulebook(sites={self.num_sites}, kernel_size={self.kernel_size}, dilation={self.dilation}, "
            f"pairs={self.num_pairs})"
        )


def _first_offsets(kernel_size: tuple[int, ...], dilation: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the offsets of the kernel positions before the middle. Position -1 - i is the mirror of i."""
    steps = [
        range(-(size // 2) * apart, size // 2 * apart + 1, apart)
        for size, apart in zip(kernel_size, dilation, strict=True)
    ]
    offsets = list(product(*steps))
    return offsets[: len(offsets) // 2]


def _find_pairs(coords: Tensor, offsets: list[tuple[int, ...]]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return the sites that have a neighbor at each offset, by sorting and searching their numbers."""
    if not len(coords):
        return ((coords.new_zeros(0), coords.new_zeros(0)),) * len(offsets)
    # Lines are padded by the size of the kernel, so that an offset beyond the end of a line misses the next line.
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
    """Return row-major numbers of the sites in their bounding box, with lines that are ``reach`` cells longer."""
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
            f"{_RULEBOOK}: the box around the sites has {' x '.join(map(str, spans))} cells, more than 2^63 - 1, "
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
            f"{_RULEBOOK}: every site must be given once, but rows {first} and {second} are both "
            f"{to_list(coords[first])}. coords.unique(dim=0, return_inverse=True) merges them; add their features "
            "by segment_sum."
        )


def _check_coords(coords: Tensor) -> None:
    check_integers(_RULEBOOK, "coords", coords)
    if coords.ndim != 2 or coords.shape[1] < 2:
        raise ValueError(
            f"{_RULEBOOK}: coords must be [sites, 1 + d], the number of the example and d coordinates, "
            f"got {list(coords.shape)}."
        )


def _sizes(name: str, given: int | Sequence[int], num_dims: int) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, Sequence) else (given,) * num_dims
    if not all(is_integer(size) for size in sizes):
        raise TypeError(f"{_RULEBOOK}: {name} must be an int or a sequence of them, got {given!r}.")
    if len(sizes) != num_dims:
        raise ValueError(
            f"{_RULEBOOK}: coords have {num_dims} dimensions beside the number of the example, so {name} must be one "
            f"number or {num_dims}, got {given!r}."
        )
    if min(sizes) < 1:
        raise ValueError(f"{_RULEBOOK}: {name} must be at least 1, got {given!r}.")
    return sizes


_CALL = "conv(x, weight, rulebook, bias)"

_Gradients: TypeAlias = tuple[None, Tensor | None, Tensor | None]


def conv(x: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None = None) -> Tensor:
    r"""Submanifold convolution: convolve features on the sites of a sparse grid, with output on the same sites.

    .. math:: y_p = b + \sum_{o \,:\, p + o \text{ is a site}} W_o \, x_{p + o}

    The result equals ``torch.nn.functional.conv2d`` (or ``conv1d``, ``conv3d``) of the dense grid, read at the sites,
    with padding ``dilation * (kernel_size - 1) / 2``. The grid is zero elsewhere and never materialized. Time is
    proportional to the pairs of sites, and memory of every derivative to the sites.

    Args:
        x: Features, [sites, C_in], in the order of the rulebook's ``coords``.
        weight: [C_out, C_in, *kernel_size], torch's layout.
        rulebook: The rulebook of the sites for this kernel size.
        bias: [C_out].

    Returns:
        [sites, C_out].

    Raises:
        ValueError: Shapes or devices do not match.
        TypeError: An operand has another type, or dtypes differ.

    Note:
        Under ``vmap`` the batch runs in a loop.

    Example:
        >>> coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 5, 5]])
        >>> rulebook = metagrad.sparse.Rulebook(coords, 3)
        >>> x = torch.tensor([[1.0], [2.0], [4.0]])
        >>> metagrad.sparse.conv(x, torch.ones(1, 1, 3, 3), rulebook).tolist()
        [[3.0], [3.0], [4.0]]

    References:
        Graham, van der Maaten, "Submanifold sparse convolutional networks", arXiv:1706.01307.
    """
    _check_arguments(x, weight, rulebook, bias)
    kernels = weight.flatten(2).permute(2, 1, 0).contiguous()
    y = _Convolve.apply(rulebook, x, kernels)
    return y if bias is None else y + bias


class _ConvContext(Context, Protocol):
    """The saved arguments of a rule."""

    structure: tuple[Rulebook]


class _Rule(Bilinear):
    """A bilinear rule. Under ``vmap`` it runs once for each member of the batch."""

    @classmethod
    def vmap(
        cls, info: VmapInfo, in_dims: Sequence[int | None], rulebook: Rulebook, *operands: Tensor
    ) -> tuple[Tensor, int]:
        batches = [
            [x] * info.batch_size if dim is None else x.unbind(dim)
            for x, dim in zip(operands, in_dims[-2:], strict=True)
        ]
        return torch.stack([cls.apply(rulebook, *member) for member in zip(*batches, strict=True)]), 0


class _Convolve(_Rule):
    """x [sites, C_in], w [positions, C_in, C_out] to [sites, C_out]."""

    @staticmethod
    def forward(rulebook: Rulebook, x: Tensor, w: Tensor) -> Tensor:
        y = widened(x.new_zeros(rulebook.num_sites, w.shape[2]))
        for route, kernel in zip(rulebook.routes(), w, strict=True):
            if route is None:
                y += x @ kernel
            else:
                to, of = route
                y.index_add_(0, to, widened(x[of] @ kernel))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: _ConvContext, grad: Tensor) -> _Gradients:
        x, w = ctx.saved_tensors
        (rulebook,) = ctx.structure
        d_x = _Convolve.apply(rulebook, grad, _adjoint(w)) if ctx.needs_input_grad[1] else None
        d_w = _Correlate.apply(rulebook, x, grad) if ctx.needs_input_grad[2] else None
        return None, d_x, d_w


class _Correlate(_Rule):
    """x [sites, C_in], g [sites, C_out] to [positions, C_in, C_out], the sum of x g^T over pairs of sites."""

    @staticmethod
    def forward(rulebook: Rulebook, x: Tensor, g: Tensor) -> Tensor:
        routes = rulebook.routes()
        w = x.new_empty(len(routes), x.shape[1], g.shape[1])
        for i, route in enumerate(routes):
            w[i] = x.mT @ g if route is None else x[route[1]].mT @ g[route[0]]
        return w

    @staticmethod
    def backward(ctx: _ConvContext, grad: Tensor) -> _Gradients:
        x, g = ctx.saved_tensors
        (rulebook,) = ctx.structure
        d_x = _Convolve.apply(rulebook, g, _adjoint(grad)) if ctx.needs_input_grad[1] else None
        d_g = _Convolve.apply(rulebook, x, grad) if ctx.needs_input_grad[2] else None
        return None, d_x, d_g


def _adjoint(w: Tensor) -> Tensor:
    """Return the kernel of the backward pass. Mirrored positions have the same pairs of sites."""
    return w.flip(0).mT.contiguous()


def _check_arguments(x: Tensor, weight: Tensor, rulebook: Rulebook, bias: Tensor | None) -> None:
    check_type(f"{_CALL}: rulebook", rulebook, Rulebook)
    for name, tensor in (("x", x), ("weight", weight)) + ((("bias", bias),) if bias is not None else ()):
        check_floating(_CALL, name, tensor)
        check_same(_CALL, f"x and {name}", x, tensor)
    check_device(_CALL, "x and rulebook", x, rulebook)
    if x.ndim != 2 or x.shape[0] != rulebook.num_sites:
        raise ValueError(
            f"{_CALL}: the rulebook has {rulebook.num_sites} sites, so x must be [{rulebook.num_sites}, C_in], "
            f"got {list(x.shape)}."
        )
    kernel = list(rulebook.kernel_size)
    if weight.ndim != 2 + len(kernel) or list(weight.shape[2:]) != kernel or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"{_CALL}: x has {x.shape[1]} channels and the rulebook is for kernel_size {rulebook.kernel_size}, so "
            f"weight must be [C_out, {x.shape[1]}, {', '.join(map(str, kernel))}], got {list(weight.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{_CALL}: weight has {weight.shape[0]} output channels, so bias must be [{weight.shape[0]}], "
            f"got {list(bias.shape)}."
        )
