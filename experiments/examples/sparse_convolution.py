"""Convolve only the ink of strokes: a Hessian-vector product of a network on sparse images.

    python -m experiments.examples.sparse_convolution

The sites are the ink of Omniglot's images at their full 105 x 105 pixels. About eight percent of the pixels are
ink. With `--curves` the sites are random curves in a 3-D grid, as in Graham, van der Maaten, arXiv:1706.01307. Two
submanifold convolutions and a mean over the sites classify them. The loss, its gradient and a Hessian-vector
product with respect to the weights are checked against a dense convolution. It covers the whole grid, masked to the
sites after each layer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.examples.common import compare, find_file
from metagrad.sparse.operations.conv import Rulebook, conv
from metagrad.sparse.operations.segments import segment_mean

Params = dict[str, Tensor]
Classify = Callable[[Params], Tensor]
TOLERANCE = 1e-9  # relative, float64
MIB = 2**20


def drawings(num: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the ink of one image of each of several characters, shape [sites, 3], and the grid."""
    with np.load(find_file("omniglot/omniglot_105_bits.npz"), allow_pickle=False) as file:
        packed = file["images_packed"][: num * 20 : 20]
    ink = np.unpackbits(packed, axis=1)[:, : 105 * 105].reshape(num, 105, 105)
    return torch.from_numpy(ink).nonzero(), (num, 105, 105)


def curves(num: int, *, side: int = 32) -> tuple[Tensor, tuple[int, ...]]:
    """Return the sites that random closed curves pass through, [sites, 4], and the grid."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.linspace(0, 2 * torch.pi, 400)
    waves = torch.stack([(k * angle).sin() for k in (1, 2)] + [(k * angle).cos() for k in (1, 2)])
    points = torch.einsum("ndk,ka->nad", torch.randn(num, 3, 4, generator=generator), waves)
    scaled = points / points.abs().amax((1, 2), keepdim=True)
    places = ((scaled + 1) / 2 * (side - 1)).round().long()
    example = torch.arange(num).view(-1, 1, 1).expand(-1, len(angle), 1)
    return torch.cat([example, places], 2).flatten(0, 1).unique(dim=0), (num, side, side, side)


def init(num_dims: int, channels: int, classes: int) -> Params:
    """Draw the weights of two convolutions and a linear layer."""
    generator = torch.Generator().manual_seed(0)
    kernel = (3,) * num_dims
    shapes = {
        "first": (channels, 1, *kernel),
        "second": (channels, channels, *kernel),
        "last": (classes, channels),
    }
    draw = lambda shape: torch.randn(shape, generator=generator) / np.prod(shape[1:]) ** 0.5  # noqa: E731
    return {name: draw(shape).double().requires_grad_() for name, shape in shapes.items()}


def sparse_network(coords: Tensor, num: int) -> Classify:
    """Return the network on the sites."""
    rulebook = Rulebook(coords, 3)
    ink = torch.ones(len(coords), 1, dtype=torch.float64)

    def classify(params: Params) -> Tensor:
        hidden = F.silu(conv(ink, params["first"], rulebook))
        hidden = F.silu(conv(hidden, params["second"], rulebook))
        return segment_mean(hidden, coords[:, 0], num) @ params["last"].T

    return classify


def dense_network(coords: Tensor, grid: tuple[int, ...]) -> Classify:
    """Return the same network on the whole grid."""
    mask = torch.zeros(grid, dtype=torch.float64).index_put(
        coords.unbind(1), torch.ones(1, dtype=torch.float64)
    )
    mask = mask.unsqueeze(1)
    conv = F.conv2d if len(grid) == 3 else F.conv3d

    def classify(params: Params) -> Tensor:
        hidden = F.silu(conv(mask, params["first"], padding=1)) * mask
        hidden = F.silu(conv(hidden, params["second"], padding=1)) * mask
        return hidden.flatten(2).sum(2) / mask.flatten(2).sum(2) @ params["last"].T

    return classify


def second_order(classify: Classify, params: Params, labels: Tensor) -> tuple[Tensor, Params, Params]:
    """Return the loss, its gradient, and the product of its Hessian with the gradient."""
    loss = F.cross_entropy(classify(params), labels)
    gradient = mg.grad(loss, params, create_graph=True)
    product = torch.stack([(g * g.detach()).sum() for g in gradient.values()]).sum()
    return loss, gradient, mg.grad(product, params)


def measure(classify: Classify, params: Params, labels: Tensor) -> tuple[float, float]:
    """Return the peak in MiB and the seconds of both orders."""
    with mg.MemoryTracker() as memory:
        second_order(classify, params, labels)
    begin = time.perf_counter()
    second_order(classify, params, labels)
    return memory.peak / MIB, time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--examples", type=int, default=20, help="number of images or curves, one for each class"
    )
    parser.add_argument("--channels", type=int, default=16, help="of the hidden layers")
    parser.add_argument("--curves", action="store_true", help="curves in 3-D instead of images")
    options = parser.parse_args(arguments)

    coords, grid = (curves if options.curves else drawings)(options.examples)
    cells = int(np.prod(grid))
    print(f"{len(coords)} sites of {cells} cells ({100 * len(coords) / cells:.1f} %), {Rulebook(coords, 3)}")
    params = init(len(grid) - 1, options.channels, options.examples)
    labels = torch.arange(options.examples)
    networks = sparse_network(coords, options.examples), dense_network(coords, grid)

    print("Against dense convolution, float64:")
    (loss, *derivatives), (expected_loss, *expected) = (second_order(n, params, labels) for n in networks)
    compare("loss", loss, expected_loss, tolerance=TOLERANCE)
    for order, got, want in zip(("gradient", "Hessian-vector product"), derivatives, expected, strict=True):
        for name in params:
            compare(f"{order}, {name}", got[name], want[name], tolerance=TOLERANCE)
    (mib, seconds), (dense_mib, dense_seconds) = (measure(network, params, labels) for network in networks)
    print(f"Peak: sparse {mib:.1f} MiB, dense {dense_mib:.1f} MiB, ratio {dense_mib / mib:.1f}")
    print(f"Time: sparse {seconds:.3f} s, dense {dense_seconds:.3f} s, ratio {dense_seconds / seconds:.1f}")


if __name__ == "__main__":
    main()
