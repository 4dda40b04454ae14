r"""Test-time training: a sequence layer whose hidden state is a small model that is trained on the context.

    python -m experiments.examples.test_time_training [--out test_time_training.png]

Each token gives a key k, a value v, a query q and learning rates. The inner model f is linear or has one hidden
layer. Each chunk of tokens is one mini-batch step on :math:`\|f(k) - v\|^2 / 2`. The outer loss is differentiated
through all steps by :func:`metagrad.unroll`. The task is multi-query associative recall: keys are followed by their
values, then each key is shown again and the model predicts its value. Causal attention of the same width is the
baseline.

References:
    Sun et al., "Learning to (learn at test time): RNNs with expressive hidden states", arXiv:2407.04620 (the layer,
    section 2.5 for the dual form). Behrouz, Zhong, Mirrokni, "Titans: learning to memorize at test time",
    arXiv:2501.00663. Arora et al., "Zoology: measuring and improving recall in efficient language models",
    arXiv:2312.04927 (the task).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run.plots.panels import Curve, Panel, all_curves
from experiments.run.progress import Progress

KEYS = 128  # there are as many values
WIDTH, BATCH = 32, 16
PAIRS = 32  # in the longest training sequence
TESTED = (4, 8, 16, 32, 48, 64, 96, 128)  # pairs
MEMORIES = ("full", "step", "sqrt")
MIB = 2**20


def normalized(x: Tensor) -> Tensor:
    """Return rows of unit norm. The second derivative at zero is finite, in contrast to ``F.normalize``."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def train_on_chunk(weights: list[Tensor], t: int, row: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
    r"""Take one step of the inner model on a chunk, and return its predictions at the queries.

    The prediction at token t uses the weights :math:`W_t = W - \sum_{s \le t} \eta_s u_s g_s^T`, where u is the input
    of a layer and g the gradient of its output. The dual form computes :math:`z W_t` without materializing
    :math:`W_t`. So the layer is causal within a chunk.

    Args:
        weights: The weights ``[B, in, out]`` of each layer before the chunk.
        t: The number of the chunk.
        row: Queries, keys and values ``[B, C, width]``, and learning rates ``[B, C, layers]``.

    Returns:
        The weights after the chunk, and the predictions ``[B, C, width]``.
    """
    query, key, value, rates = row
    inputs, outputs = [key], [key @ weights[0]]
    for weight in weights[1:]:
        inputs.append(normalized(F.silu(outputs[-1])))
        outputs.append(inputs[-1] @ weight)
    loss = (outputs[-1] - value).square().sum() / 2
    grads = mg.grad(loss, outputs, create_graph=True)
    new, z = [], query
    for i, (weight, u, g) in enumerate(zip(weights, inputs, grads, strict=True)):
        z, step = normalized(F.silu(z)) if i else z, rates[..., i, None] * g
        new.append(weight - u.mT @ step)
        z = z @ weight - (z @ u.mT).tril() @ step
    return new, z


class TTT(nn.Module):
    """A test-time training layer.

    Args:
        inner: The inner model, ``"linear"`` or ``"mlp"``.
        chunk: The number of tokens in a step of the inner model.
        memory: The checkpointing policy of :func:`metagrad.unroll`.
        width: The size of keys, values and queries. The input has twice this size.
    """

    def __init__(self, inner: str, chunk: int = 16, memory: str = "sqrt", width: int = WIDTH) -> None:
        super().__init__()
        self.chunk, self.memory = chunk, memory
        sizes = {"linear": [width, width], "mlp": [width, 4 * width, width]}[inner]
        self.project = nn.Linear(2 * width, 3 * width, bias=False)
        self.rate = nn.Linear(2 * width, len(sizes) - 1)
        nn.init.zeros_(self.rate.weight)
        nn.init.constant_(self.rate.bias, 2.0 - len(sizes))
        self.weights = nn.ParameterList(torch.zeros(a, b) for a, b in pairwise(sizes))
        for weight in self.weights[:-1]:  # the inner model is zero, and its hidden units differ
            nn.init.normal_(weight, std=3 / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, L, 2 * width]`` to ``[B, L, width]``. Output t depends on inputs up to t."""
        query, key, value = self.project(x).chunk(3, -1)
        parts = normalized(query), normalized(key), value, self.rate(x).sigmoid()
        padded = [F.pad(part, (0, 0, 0, -x.shape[1] % self.chunk)) for part in parts]
        rows = tuple(part.unflatten(1, (-1, self.chunk)).transpose(0, 1) for part in padded)
        with torch.enable_grad():  # the inner model is also trained under no_grad
            start = [weight.expand(len(x), -1, -1) for weight in self.weights]
        _, z = mg.unroll(train_on_chunk, start, steps=len(rows[0]), inputs=rows, memory=self.memory)
        return z.transpose(0, 1).flatten(1, 2)[:, : x.shape[1]]


class Attention(nn.Module):
    """Causal attention with one head."""

    def __init__(self, memory: str = "", width: int = WIDTH) -> None:
        super().__init__()
        self.project = nn.Linear(2 * width, 3 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, L, 2 * width]`` to ``[B, L, width]``."""
        query, key, value = self.project(x)[:, None].chunk(3, -1)  # torch has a fused kernel for four axes
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]


class Recall(nn.Module):
    """Predicts a value at every token, by one layer that sees the token and the token before."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(2 * KEYS, WIDTH), layer
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, KEYS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[B, L]`` to logits ``[B, L, KEYS]``."""
        x = self.tokens(tokens)
        return self.head(self.layer(torch.cat([x, F.pad(x[:, :-1], (0, 0, 1, 0))], -1)))


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "attention": Attention,
    "linear": partial(TTT, "linear"),
    "MLP": partial(TTT, "mlp"),
}


def sequences(batch: int, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw tokens ``[B, 3 * pairs]``, and the values ``[B, pairs]`` of the queries, which come last."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(KEYS, (batch, pairs), generator=generator)
    order = torch.rand(batch, pairs, generator=generator).argsort(1)
    context = torch.stack([keys, KEYS + values], 2).flatten(1)
    return torch.cat([context, keys.gather(1, order)], 1), values.gather(1, order)


def train(layer: nn.Module, iterations: int, seed: int) -> Recall:
    """Train a model. The number of pairs grows to ``PAIRS`` in the first two thirds of the iterations."""
    model, generator = Recall(layer), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, iterations)
    for i in Progress(range(iterations), unit="step", leave=False):
        pairs = max(4, min(PAIRS, 3 * PAIRS * i // (2 * iterations)))
        tokens, values = sequences(BATCH, pairs, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens)[:, 2 * pairs :].flatten(0, 1), values.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # without it, some seeds stay at chance
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def accuracy(model: Recall, pairs: int) -> float:
    """Return the share of correct values on 64 new sequences."""
    tokens, values = sequences(64, pairs, torch.Generator().manual_seed(10**6))
    return float((model(tokens)[:, 2 * pairs :].argmax(-1) == values).float().mean())


def measure(layer: nn.Module, length: int) -> tuple[float, float]:
    """Return the peak in MiB and the CPU seconds of forward and backward pass on one sequence."""
    x = torch.randn(1, length, 2 * WIDTH, requires_grad=True)
    with mg.MemoryTracker(device="cpu") as tracker:
        layer(x).square().sum().backward()
    begin = time.process_time()
    layer(x).square().sum().backward()
    return tracker.peak / MIB, time.process_time() - begin


def accuracies(iterations: int, seed: int) -> dict[str, list[float]]:
    """Train each layer, and return its accuracies (%) at the tested lengths."""
    found = {}
    print("accuracy (%) at", *(f"{3 * pairs:6d}" for pairs in TESTED), "tokens", flush=True)
    for name, kind in LAYERS.items():
        torch.manual_seed(seed)
        model = train(kind(memory="full"), iterations, seed)
        found[name] = [100 * accuracy(model, pairs) for pairs in TESTED]
        print(f"{name:14}", *(f"{value:6.1f}" for value in found[name]))
    print(f"chance is {100 / KEYS:.1f}")
    return found


def peaks(lengths: list[int]) -> dict[str, list[float]]:
    """Return the peaks (MiB) of each layer and checkpointing policy at the lengths."""
    found = {}
    print("peak (MiB) and CPU seconds at", *lengths, "tokens")
    for name, kind in LAYERS.items():
        for memory in ("",) if name == "attention" else MEMORIES:
            measured = [measure(kind(memory=memory), length) for length in lengths]
            row = f'{name}, "{memory}"' if memory else name
            found[row] = [peak for peak, _ in measured]
            print(f"{row:14}", *(f"{peak:8.2f} {seconds:6.2f}" for peak, seconds in measured))
    return found


def curves(x: list[float], found: dict[str, list[float]]) -> dict[str, Curve]:
    """Return the curves of a panel."""
    return {name: Curve(x, y, y, y) for name, y in found.items()}


def main(arguments: list[str] | None = None) -> None:
    """Print both tables, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=600, help="outer steps of each model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096], help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the picture goes")
    options = parser.parse_args(arguments)
    tested, used = accuracies(options.iterations, options.seed), peaks(options.lengths)
    if options.out is not None:
        shown = {name: peak for name, peak in used.items() if "linear" not in name}
        x = "Sequence length (tokens)"
        recall, memory = (
            "The MLP recalls more pairs than the linear model",
            "Checkpointing saves most of the memory",
        )
        all_curves(options.out, [
            Panel(recall, x, "Accuracy (%)", "log", "linear", curves([3 * pairs for pairs in TESTED], tested)),
            Panel(memory, x, "Peak memory (MiB)", "log", "log", curves(options.lengths, shown)),
        ])  # fmt: skip


if __name__ == "__main__":
    main()
