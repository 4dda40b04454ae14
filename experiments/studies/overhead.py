"""The cost of higher derivatives, and how to reduce it: `python -m experiments.studies.overhead`.

Four models are measured: bytes and CPU seconds of gradients, second derivatives, Hessian-vector products and
meta-gradients over inner steps, with every method that reduces the cost. Times are ratios within a round, in which
all methods of a model take turns.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import metagrad as mg
from experiments.benchmarks.maml.models import Transformer
from experiments.run.files import markdown
from experiments.run.measure import cpu_seconds, held_bytes, peak_bytes
from experiments.run.plots.style import BLUE, MUTED, VERMILION, figure, legend_below
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell
from metagrad.sparse import RowSparse, embedding
from metagrad.tasks import Batch, Examples

GRADIENT, SECOND, PRODUCT, META = "gradient", "second derivative", "Hessian-vector product", "meta-gradient"
CLASSES, FEATURES, LENGTH, SIDE, ROWS = 10, 64, 32, 14, 20_000
RATE, PIECES = 0.05, 4  # of the inner steps, and mini-batches of an accumulation
EXACT, MIB = 1e-4, 2**20  # larger errors are written
OVER_STEPS = ("", "step", "sqrt")
TITLES = {"mlp": "MLP", "convnet": "ConvNet", "transformer": "Transformer", "table": "Embedding table"}


@dataclass
class OverheadConfig(StudyConfig):
    """The measured models and steps."""

    sizes: dict[str, list[int]] = key("Layers, features of a layer and examples, for each model.")
    steps: list[int] = key("Numbers of inner steps.")
    inner_steps: int = key("Inner steps of the comparison of techniques.")
    rounds: int = key("How often everything is timed, in turns.")


@dataclass(frozen=True)
class Task:
    """The loss of a chain of blocks, with support and query examples. Gradients of `tables` are row-sparse."""

    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor
    tables: tuple[str, ...] = ()

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.model.named_parameters())

    def loss(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the loss at other parameters."""
        return self.loss_fn(functional_call(self.model, params, (x,)), y)

    def pieces(self) -> list[tuple[Tensor, Tensor]]:
        """Return the support examples as mini-batches."""
        return list(zip(self.x.chunk(PIECES), self.y.chunk(PIECES), strict=True))


class Lookup(nn.Embedding):
    """An embedding table whose gradient is row-sparse unless it `is_dense`."""

    is_dense = False

    def forward(self, input: Tensor) -> Tensor:
        """Look up rows."""
        return F.embedding(input, self.weight) if self.is_dense else embedding(input, self.weight)


def mlp(depth: int, width: int, batch: int) -> Task:
    """Return layers with tanh."""
    pairs = pairwise([FEATURES, *[width] * depth])
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs]
    return classified(nn.Sequential(*layers, nn.Linear(width, CLASSES)), (batch, FEATURES))


def convnet(depth: int, width: int, batch: int) -> Task:
    """Return 3x3 convolutions with GELU on small images, and the mean over space."""
    pairs = pairwise([1, *[width] * depth])
    layers = [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GELU()) for a, b in pairs]
    head = nn.Sequential(nn.AvgPool2d(SIDE), nn.Flatten(), nn.Linear(width, CLASSES))
    return classified(nn.Sequential(*layers, head), (batch, 1, SIDE, SIDE))


def transformer(depth: int, width: int, batch: int) -> Task:
    """Return pre-norm blocks with four heads."""
    return classified(Transformer(depth, width), (batch, LENGTH, width))


def table(depth: int, width: int, batch: int) -> Task:
    """Return an embedding table, and layers with tanh on the rows that are looked up."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    model = nn.Sequential(Lookup(ROWS, width), *layers, nn.Linear(width, 1))
    (x, query_x), (y, query_y) = torch.randint(ROWS, (2, batch)), torch.randn(2, batch)
    # torch's own squared error has no forward derivative
    loss = lambda prediction, y: (prediction.squeeze(-1) - y).square().mean()  # noqa: E731
    return Task(model, loss, x, y, query_x, query_y, tables=("0.weight",))


def classified(model: nn.Module, shape: Sequence[int]) -> Task:
    """Return the cross-entropy of random examples."""
    (x, query_x), (y, query_y) = torch.randn(2, *shape), torch.randint(CLASSES, (2, shape[0]))
    return Task(model, F.cross_entropy, x, y, query_x, query_y)


MODELS = {"mlp": mlp, "convnet": convnet, "transformer": transformer, "table": table}


class Run(NamedTuple):
    """Two functions: `hold` computes objects such as a graph, and `finish` computes the result from them."""

    hold: Callable[[], Any]
    finish: Callable[[Any], Any]


def at_once(compute: Callable[[], Any]) -> Run:
    """Return a run that holds no objects between its two parts."""
    return Run(lambda: None, lambda _: compute())


def gradient(task: Task) -> Run:
    """Hold the graph of the loss."""
    params = list(task.params.values())
    return Run(
        lambda: task.loss_fn(task.model(task.x), task.y), lambda loss: torch.autograd.grad(loss, params)
    )


def second(task: Task) -> Run:
    """Hold the graph of the gradient by create_graph=True, and differentiate half of its squared norm."""
    params = list(task.params.values())

    def hold() -> Sequence[Tensor]:
        return torch.autograd.grad(task.loss_fn(task.model(task.x), task.y), params, create_graph=True)

    def finish(grads: Sequence[Tensor]) -> Sequence[Tensor]:
        values = [g.values if isinstance(g, RowSparse) else g for g in grads]
        return torch.autograd.grad(torch.stack([part.square().sum() for part in values]).sum() / 2, params)

    return Run(hold, finish)


def direction(task: Task) -> dict[str, Tensor]:
    """Return the gradient, which is the vector of the Hessian-vector product."""
    run = gradient(task)
    return {name: dense(g) for name, g in zip(task.params, run.finish(run.hold()), strict=True)}


def product(task: Task, *, in_pieces: bool = False) -> Run:
    """Multiply by an existing operator. It takes dense gradients of a table."""
    v, task = direction(task), densified(task) if task.tables else task
    data = task.pieces() if in_pieces else (task.x, task.y)
    return Run(lambda: mg.hessian(task.loss, task.params, data), lambda H: H @ v)


def forward_over_reverse(task: Task) -> Run:
    """Differentiate the gradient in forward mode."""
    v, task = direction(task), densified(task) if task.tables else task

    def compute() -> Any:
        grad = lambda params: torch.func.grad(task.loss)(params, task.x, task.y)  # noqa: E731
        leaves = {name: p.detach() for name, p in task.params.items()}
        return torch.func.jvp(grad, (leaves,), (v,))[1]

    return at_once(compute)


def finite_difference(task: Task) -> Run:
    r"""Take two gradients, at :math:`\theta \pm \epsilon v` (Nocedal, Wright, 2006, section 8.1)."""
    v = direction(task)
    norm = torch.linalg.vector_norm(flat(v))
    epsilon = (torch.finfo(torch.float32).eps ** (1 / 3) / norm).item()

    def at(sign: int) -> Sequence[Tensor]:
        point = {name: (p + sign * epsilon * v[name]).detach() for name, p in task.params.items()}
        leaves = {name: p.requires_grad_() for name, p in point.items()}
        return torch.autograd.grad(task.loss(leaves, task.x, task.y), list(leaves.values()))

    return at_once(
        lambda: [(dense(a) - dense(b)) / (2 * epsilon) for a, b in zip(at(1), at(-1), strict=True)]
    )


def maml(task: Task, steps: int, **options: Any) -> Run:
    """Hold the graph of the query loss after inner steps of gradient descent."""
    rule = mg.optim.rules.sgd(lr=RATE)
    learner = mg.MAML(task.model, task.loss_fn, inner=rule, steps=steps, sparse=task.tables, **options)
    support = Examples(task.x[None], task.y[None])
    batch = Batch(support, Examples(task.query_x[None], task.query_y[None]))
    params = list(task.params.values())
    return Run(lambda: learner(batch).loss, lambda loss: torch.autograd.grad(loss, params))


def loop(task: Task, steps: int) -> Run:
    """Hold the graph of the naive loop."""
    params = task.params

    def hold() -> Tensor:
        fast = params
        for _ in range(steps):
            loss = task.loss(fast, task.x, task.y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - RATE * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        return task.loss(fast, task.query_x, task.query_y)

    return Run(hold, lambda loss: torch.autograd.grad(loss, list(params.values())))


class Recomputed(nn.Module):
    """A chain in about sqrt(n) segments of its n blocks, which are recomputed in the backward pass."""

    def __init__(self, model: nn.Sequential, recompute: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        blocks, self.recompute = list(model), recompute
        size = math.isqrt(len(blocks) - 1) + 1
        self.segments = nn.ModuleList(
            nn.Sequential(*blocks[i : i + size]) for i in range(0, len(blocks), size)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Call the segments in order."""
        for segment in self.segments:
            x = self.recompute(segment, x)
        return x


def recomputed(recompute: Callable[..., Any], task: Task) -> Task:
    """Recompute segments of the model in the backward pass."""
    assert isinstance(task.model, nn.Sequential)
    model = Recomputed(task.model, recompute)
    names = {id(p): name for name, p in model.named_parameters()}
    return replace(task, model=model, tables=tuple(names[id(task.params[name])] for name in task.tables))


def densified(task: Task) -> Task:
    """Take dense gradients of tables."""
    if not task.tables:
        raise ValueError("there is nothing sparse in the model")
    model = copy.deepcopy(task.model)
    for part in model.modules():
        if isinstance(part, Lookup):
            part.is_dense = True
    return replace(task, model=model, tables=())


CHANGES: dict[str, Callable[[Task], Task]] = {
    "mg.checkpoint": partial(recomputed, mg.checkpoint),
    "torch checkpoint": partial(recomputed, partial(torch_checkpoint, use_reentrant=False)),
    "dense": densified,
}
"""Variants of a model, for any quantity."""


def ways(steps: int) -> dict[str, dict[str, Callable[[Task], Run]]]:
    """Return the methods that compute a quantity, by name. The first is the baseline."""
    inner: dict[str, Callable[[Task], Run]] = {
        "": partial(maml, steps=steps),
        "step": partial(maml, steps=steps, memory="step"),
        "sqrt": partial(maml, steps=steps, memory="sqrt"),
        "first order": partial(maml, steps=steps, order=1),
        "naive loop": partial(loop, steps=steps),
    }
    products = {
        "": product,
        "forward over reverse": forward_over_reverse,
        "finite difference": finite_difference,
        "four mini-batches": partial(product, in_pieces=True),
    }
    return {GRADIENT: {"": gradient}, SECOND: {"": second}, PRODUCT: products, META: inner}


def dense(tensor: Tensor) -> Tensor:
    """Return a row-sparse tensor as a dense tensor."""
    return tensor.to_dense() if isinstance(tensor, RowSparse) else tensor


def flat(result: Any) -> Tensor:
    """Return a result as one vector in float64."""
    parts = result.values() if isinstance(result, dict) else result
    return torch.cat([dense(part).detach().double().flatten() for part in parts])


def techniques(config: OverheadConfig, model: str, work: Work) -> Result:
    """Measure every quantity of a model with every method."""
    found = []
    for quantity, own in ways(config.inner_steps).items():
        changed = {name: lambda task, name=name, own=own: own[""](CHANGES[name](task)) for name in CHANGES}
        found += [(quantity, technique, make) for technique, make in {**own, **changed}.items()]
    return {"rows": measured(task_of(config, model, work.seed), found, config.rounds, work.seed)}


def over_steps(config: OverheadConfig, model: str, work: Work) -> Result:
    """Measure meta-gradients over inner steps."""
    rows = []
    for steps in config.steps:
        found = [(META, technique, ways(steps)[META][technique]) for technique in OVER_STEPS]
        own = measured(task_of(config, model, work.seed), found, 1, work.seed)
        rows += [{"steps": steps, **row} for row in own]
    return {"rows": rows}


def task_of(config: OverheadConfig, model: str, seed: int) -> Task:
    """Return a model with its data."""
    torch.manual_seed(seed)
    return MODELS[model](*config.sizes[model])


def measured(
    task: Task, found: Sequence[tuple[str, str, Any]], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """Measure the memory of each method, and then the time of all methods alternately."""
    rows, exact, runs = [], {}, []
    for quantity, technique, make in Progress(found, unit="method", leave=False):
        row = {"quantity": quantity, "technique": technique, "seconds": []}
        try:
            run = make(task)
            result = flat(run.finish(run.hold()))
            expected = exact.setdefault(quantity, result)
            gc.collect()
            row |= {
                "error": ((result - expected).norm() / expected.norm()).item(),
                "held": held_bytes(run.hold),
                "peak": peak_bytes(lambda run=run: run.finish(run.hold())),
            }
        except Exception:  # the method does not fit the model
            continue
        rows.append(row)
        runs.append((row, run))
    shuffle = random.Random(seed)
    for _ in range(rounds):
        for row, run in shuffle.sample(runs, len(runs)):
            row["seconds"].append(cpu_seconds(lambda run=run: run.finish(run.hold()), calls=3))
    return rows


def of(one: Result, quantity: str, technique: str) -> dict[str, Any] | None:
    """Return a row of a result, if the method fits the model."""
    return next(
        (row for row in one["rows"] if (row["quantity"], row["technique"]) == (quantity, technique)), None
    )


def ratios(row: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """Return peak and seconds of a row relative to another, as the median over rounds."""
    seconds = [a / b for a, b in zip(row["seconds"], base["seconds"], strict=True)]
    return row["peak"] / base["peak"], statistics.median(seconds)


def report(results: list[Result], config: OverheadConfig) -> str:
    """Return the page."""
    found, parts = by_cell(results), []
    models = {name: found[f"{name}/techniques"][0] for name in config.sizes if f"{name}/techniques" in found}
    for quantity, own in ways(1).items():
        table = [[quantity, *models]]
        for technique in (*own, *CHANGES):
            rows = [(of(one, quantity, technique), one) for one in models.values()]
            if any(row for row, _ in rows):
                texts = [_text(row, one, quantity) if row else "" for row, one in rows]
                table.append([technique or "no technique", *texts])
        parts.append(markdown(table))
    steps = [["model", "memory", *map(str, config.steps)]]
    for name in config.sizes:
        for technique in OVER_STEPS if f"{name}/steps" in found else ():
            own = [row for row in found[f"{name}/steps"][0]["rows"] if row["technique"] == technique]
            steps.append([name, technique or "full", *(f"{row['peak'] / MIB:.3g}" for row in own)])
    tables = "\n\n".join(parts)
    return f"""# What an order of differentiation costs

Each cell has the peak memory and the time. The first row of "gradient" is in MiB and ms. The row "no technique" of
the other tables is relative to a gradient of the same model. Other rows are relative to "no technique". A cell gives
the relative error of the result if it is above {EXACT:g}. "Second derivative" is the gradient of half the squared
norm of the gradient, by create_graph=True. A meta-gradient has {config.inner_steps} inner steps.

{tables}

Peak of a meta-gradient (MiB), over inner steps:

{markdown(steps)}
"""


def _text(row: dict[str, Any], one: Result, quantity: str) -> str:
    base = of(one, quantity if row["technique"] else GRADIENT, "")
    if base is None or row is base:
        return f"{row['peak'] / MIB:.3g} MiB, {1000 * statistics.median(row['seconds']):.3g} ms"
    peak, time = ratios(row, base)
    return f"{peak:.2f}, {time:.1f}" + (f", off by {row['error']:.0e}" if row["error"] > EXACT else "")


def figures(results: list[Result], config: OverheadConfig, folder: Path) -> list[Path]:
    """Draw peak memory and time of second derivatives, relative to a gradient."""
    found, path = by_cell(results), folder / "overhead.png"
    models = [name for name in config.sizes if f"{name}/techniques" in found]
    with figure(path, 1, 2, size=(9, 4)) as axes:
        for place, title in enumerate(("Peak memory", "Time")):
            axis = axes[0, place]
            for i, (quantity, color) in enumerate(((SECOND, BLUE), (PRODUCT, VERMILION))):
                values = {}
                for height, name in enumerate(models):
                    one = found[f"{name}/techniques"][0]
                    row, base = of(one, quantity, ""), of(one, GRADIENT, "")
                    if row and base:
                        values[height + 0.3 * (i - 0.5)] = ratios(row, base)[place]
                bars = axis.barh(
                    list(values), list(values.values()), height=0.27, color=color, label=quantity
                )
                axis.bar_label(bars, fmt="{:.2g}", padding=3, fontsize=8)
            axis.axvline(1, color=MUTED, linewidth=0.8)
            axis.set_xscale("log" if place == 0 else "linear")  # dense products of a table are far larger
            axis.set_yticks(range(len(models)), [TITLES[name] for name in models])
            axis.set(title=f"{title} of second derivatives", xlabel=f"{title} relative to a gradient")
            axis.grid(axis="x")
        legend_below(*axes[0], columns=2)
    return [path]


def check(config: OverheadConfig) -> None:
    """Raise `ValueError` for models that do not exist."""
    for name, size in config.sizes.items():
        if name not in MODELS or len(size) != 3 or min(size) < 1:
            raise ValueError(
                f"overhead: sizes must have three counts for some of {', '.join(MODELS)}, got {name}: {size}."
            )


def cells(config: OverheadConfig) -> list[Cell]:
    """Return the methods of each model, and then inner steps."""
    runs = {f"{name}/techniques": partial(techniques, config, name) for name in config.sizes}
    runs |= {f"{name}/steps": partial(over_steps, config, name) for name in config.sizes}
    return [Cell(name, config.seeds[0], run) for name, run in runs.items()]


study = Study("overhead", OverheadConfig, cells=cells, report=report, figures=figures, check=check)

if __name__ == "__main__":
    study.main()
