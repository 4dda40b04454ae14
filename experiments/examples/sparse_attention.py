"""Attend within a band, and differentiate twice: memory and time grow with the width of the band.

    python -m experiments.examples.sparse_attention

Every query attends to the keys at most `--band` places away, as in the sliding windows of Longformer (Beltagy,
Peters, Cohan, arXiv:2004.05150). The program measures a Hessian-vector product of a loss with respect to queries,
keys and values. The dense attention is torch's MATH kernel, the only kernel with second derivatives.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import metagrad as mg
from experiments.examples.common import compare
from experiments.run.progress import Progress, tell
from metagrad.sparse import Pattern
from metagrad.sparse.operations.attention import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCE = 1e-9  # relative, float64
MIB = 2**20


def banded(pattern: Pattern) -> Attend:
    """Return attention over a pattern."""
    return lambda q, k, v: attention(q, k, v, pattern)


def masked(pattern: Pattern) -> Attend:
    """Return torch's attention with the pattern as its mask."""
    mask = pattern.to_mask()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def inputs(heads: int, n: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw queries, keys and values, [heads, n, width]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(heads, n, width, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def second_order(attend: Attend, qkv: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradient of a loss, and the gradient of a penalty on it: a Hessian-vector product."""
    gradients = mg.grad(attend(*qkv).pow(3).mean(), qkv, create_graph=True)
    penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    return gradients, mg.grad(penalty, qkv)


def check(heads: int, n: int, band: int, width: int) -> None:
    """Compare both orders with dense attention in float64."""
    pattern = Pattern.banded(n, band, band)
    qkv = inputs(heads, n, width, torch.float64)
    results = [second_order(attend, qkv) for attend in (banded(pattern), masked(pattern))]
    for order, gradients, expected in zip(("gradient", "Hessian-vector product"), *results, strict=True):
        for name, got, want in zip("qkv", gradients, expected, strict=True):
            compare(f"{order}, {name}", got, want, tolerance=TOLERANCE)


def measure(attend: Attend, qkv: list[Tensor]) -> tuple[float, float]:
    """Return the peak of a double backward in MiB, and its seconds."""
    second_order(attend, qkv)  # a pattern's maps are made on first use
    with mg.MemoryTracker() as memory:
        second_order(attend, qkv)
    begin = time.perf_counter()
    second_order(attend, qkv)
    return memory.peak / MIB, time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="of sequences"
    )
    parser.add_argument("--dense-up-to", type=int, default=4096, help="length to which dense is run as well")
    parser.add_argument("--band", type=int, default=64, help="keys that a query sees on each side")
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--heads", type=int, default=1, help="number of heads")
    options = parser.parse_args(arguments)

    print("Against dense attention, 2 heads of 128 places, band 8, float64:")
    check(2, 128, 8, options.width)
    print(f"Double backward, float32, {options.heads} x {options.width}, band {options.band}:")
    print(f"  {'length':>8} {'sparse MiB':>11} {'seconds':>8} {'dense MiB':>10} {'seconds':>8}")
    for n in Progress(options.lengths, unit="length", leave=False):
        pattern = Pattern.banded(n, options.band, options.band)
        qkv = inputs(options.heads, n, options.width, torch.float32)
        mib, seconds = measure(banded(pattern), qkv)
        row = f"  {n:>8} {mib:>11.1f} {seconds:>8.3f}"
        if n <= options.dense_up_to:
            mib, seconds = measure(masked(pattern), qkv)
            row += f" {mib:>10.1f} {seconds:>8.3f}"
        tell(row)


if __name__ == "__main__":
    main()
