"""Hessian products of a small GPT-2, plain and in chunks: `python -m experiments.benchmarks.heads`.

The model has random weights and the vocabulary of GPT-2: 50,257 tokens, tied to the output layer. Its defaults are
two layers of width 128 with four heads, at 512 positions. Each row is one Hessian-vector product of the mean cross
entropy, by `mg.hessian` or by a double backward pass. Bytes are the peak of storages above the parameters, the vector
and the tokens. Times are CPU seconds, the median over rounds that alternate between rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg

VOCABULARY = 50_257


class Block(nn.Module):
    """A layer of GPT-2: attention and a network of one hidden layer, both after a layer norm."""

    def __init__(self, width: int, heads: int, chunk: int | None) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and the network to ``[B, L, width]``."""
        parts = self.inward(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        ours = partial(mg.autograd.attention, chunk=self.chunk or 1)
        mixed = (F.scaled_dot_product_attention if self.chunk is None else ours)(q, k, v, is_causal=True)
        x = x + self.outward(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT2(nn.Module):
    """A random GPT-2 with tied embeddings. The loss is plain or in chunks."""

    def __init__(self, width: int, layers: int, heads: int, positions: int, chunk: int | None) -> None:
        super().__init__()
        self.chunk = chunk
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads, chunk) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of the labels ``[B, L]``."""
        x = self.norm(self.blocks(self.tokens(tokens) + self.places.weight[: tokens.shape[1]]))
        if self.chunk is None:
            return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), labels.flatten())
        return mg.autograd.linear_cross_entropy(x, self.tokens.weight, labels, chunk=self.chunk)


def by_hessian(model: GPT2, data: tuple[Tensor, ...], vector: dict[str, Tensor]) -> Any:
    """Multiply by the operator."""
    with mg.hessian(
        lambda p: torch.func.functional_call(model, p, data), dict(model.named_parameters())
    ) as H:
        return H @ vector


def by_backward(model: GPT2, data: tuple[Tensor, ...], vector: dict[str, Tensor]) -> Any:
    """Multiply by a double backward pass in plain torch."""
    params = dict(model.named_parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        grads = torch.autograd.grad(model(*data), [*params.values()], create_graph=True)
    products = torch.autograd.grad(grads, [*params.values()], [*vector.values()])
    return dict(zip(params, products, strict=True))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Hessian products of a GPT-2 with a large head.")
    defaults = {"width": 128, "layers": 2, "heads": 4, "positions": 512, "chunk": 2**21, "rounds": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    a = parser.parse_args()
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, a.positions + 1))
    data = tokens[:, :-1], tokens[:, 1:]
    models = {
        name: GPT2(a.width, a.layers, a.heads, a.positions, chunk)
        for name, chunk in (("plain", None), ("chunks", a.chunk))
    }
    models["chunks"].load_state_dict(models["plain"].state_dict())
    vector = {name: torch.randn_like(p) for name, p in models["plain"].named_parameters()}
    rows: dict[tuple[str, str], Callable[[], Any]] = {
        (how.__name__, name): (lambda how=how, model=model: how(model, data, vector))
        for how in (by_hessian, by_backward)
        for name, model in models.items()
    }
    peaks, results = {}, {}
    for key, product in rows.items():
        with mg.MemoryTracker(device="cpu") as tracker:
            results[key] = product()
        peaks[key] = tracker.peak
    times: dict[tuple[str, str], list[float]] = {key: [] for key in rows}
    for _ in range(a.rounds):
        for key, product in rows.items():
            start = time.process_time()
            product()
            times[key].append(time.process_time() - start)
    print(f"{'product':14}{'model':10}{'peak MiB':>10}{'ratio':>8}{'seconds':>10}{'ratio':>8}{'error':>10}")
    for (how, name), spent in times.items():
        plain = how, "plain"
        seconds, least = sorted(spent)[len(spent) // 2], sorted(times[plain])[len(spent) // 2]
        flat, expected = (torch.cat([t.flatten() for t in results[k].values()]) for k in ((how, name), plain))
        error = float((flat - expected).norm() / expected.norm())
        print(
            f"{how:14}{name:10}{peaks[how, name] / 2**20:10.1f}{peaks[how, name] / peaks[plain]:8.2f}"
            f"{seconds:10.2f}{seconds / least:8.2f}{error:10.1e}"
        )


if __name__ == "__main__":
    main()
