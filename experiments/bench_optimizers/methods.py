"""What a step of an optimizer costs, in gradients: `python -m experiments.bench_optimizers [--workloads NAME ...]`.

An MLP, a Conv4 and a transformer, at two sizes of a batch. Before each step a gradient (zero_grad, forward, backward)
of a copy of the model is timed; printed are medians over the rounds of the ratio of both, over whole periods where a
step is not like the next: "-10" in a name says that curvature, roots or bases are renewed every 10 steps, or that
there are at most 10 products with the Hessian. The peak is that of metagrad's MemoryTracker, from making the
optimizer to the end of its first period and one step more, state included, over that of one gradient.
`pytorch_optimizer` takes part where it is installed, and is given gradients with their graph at the steps for which
it wants them.

First, estimates of diagonals are compared with dense matrices in float64, and equal rules with each other.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.util
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from experiments import provenance
from experiments.bench.models import Transformer
from experiments.bench_sparse import MIB
from experiments.plots.style import BLUE, INK, MUTED, SKY, figure
from metagrad.memory import MemoryTracker
from metagrad.models import Conv4
from metagrad.optim import KFAC, SOAP, AdaHessian, Lion, Muon, NewtonCG, Shampoo, SophiaG, SophiaH

RIVAL = "pytorch_optimizer"
LR = 1e-5  # small: what is timed is to stay finite
FEWEST = 3  # steps of a round
PROBES = 1000
TOLERANCE = 0.25  # of a mean of so many estimates, relative
GOALS = {"AdaHessian": 3.5, "SophiaH-10": 1.3, "KFAC-10": 1.6}  # gradients
RIVALS = {"AdaHessian": f"{RIVAL}.AdaHessian", "SophiaH-10": f"{RIVAL}.SophiaH-10"}

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Work:
    """A classifier and a batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean cross-entropy of a copy of the model."""
        return F.cross_entropy(model(self.x), self.y)


def mlp(batch: int) -> Work:
    """784-512-512-10 with tanh, 670k parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    return Work(model, torch.randn(batch, 784), torch.randint(10, (batch,)))


def cnn(batch: int) -> Work:
    """Conv4 of 32 filters with batch normalisation."""
    torch.manual_seed(0)
    return Work(Conv4(10, hidden=32), torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,)))


def transformer(batch: int) -> Work:
    """Two pre-norm blocks of width 128 on sequences of 32."""
    torch.manual_seed(0)
    return Work(Transformer(2), torch.randn(batch, 32, 128), torch.randint(10, (batch,)))


WORKLOADS: dict[str, Callable[[], Work]] = {
    f"{make.__name__}-{batch}": functools.partial(make, batch)
    for make in (mlp, cnn, transformer)
    for batch in (128, 512)
}


@dataclass(frozen=True)
class Method:
    """How an optimizer is made and used.

    Attributes:
        make: Of a model; several, where one does not take all parameters.
        period: Steps after which they repeat.
        wants_graph: Whether the first gradient of a period must come with its graph.
    """

    make: Callable[[nn.Module], Optimizers]
    period: int = 1
    wants_graph: bool = False

    def stepper(self, work: Work, model: nn.Module) -> Callable[[], object]:
        """Return what takes a step."""
        first, *others = self.make(model)
        count = 0

        def closure() -> Tensor:
            model.zero_grad()
            loss = work.loss(model)
            loss.backward(create_graph=self.wants_graph and count % self.period == 0)
            return loss

        def step() -> object:
            nonlocal count
            loss = first.step(closure)  # type: ignore[reportCallIssue, reportArgumentType]
            for other in others:
                other.step()
            count += 1
            return loss

        return step


def of_all(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Optimizers]:
    """Give all parameters to one optimizer."""
    return lambda model: [make(model.parameters(), lr=LR, **options)]


def of_matrices(make: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], Optimizers]:
    """Give matrices to one optimizer, and what is left to plain gradient descent."""

    def both(model: nn.Module) -> Optimizers:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return [make(matrices, lr=LR), torch.optim.SGD(others, lr=LR)]

    return both


def rival(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes an optimizer of pytorch_optimizer."""
    return lambda *args, **options: getattr(importlib.import_module(RIVAL), name)(*args, **options)


def rival_muon(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Make pytorch_optimizer's Muon, whose groups say that they are for it."""
    return rival("Muon")([{"params": list(params), "use_muon": True}], lr=lr)


METHODS: dict[str, Method] = {
    "torch.SGD": Method(of_all(torch.optim.SGD)),
    "torch.Adam": Method(of_all(torch.optim.Adam)),
    "AdaHessian": Method(of_all(AdaHessian)),
    "SophiaH-10": Method(of_all(SophiaH), period=10),
    "SophiaG-10": Method(of_all(SophiaG), period=10),
    "KFAC-10": Method(lambda model: [KFAC(model, lr=LR)], period=10),
    "Shampoo-10": Method(of_all(Shampoo, root_every=10), period=10),
    "SOAP-10": Method(of_all(SOAP), period=10),
    "Muon": Method(of_matrices(Muon)),
    "Lion": Method(of_all(Lion)),
    # Damped, lest negative curvature ends the solver at once, as it does in the CNN all the same.
    "NewtonCG-10": Method(of_all(NewtonCG, max_steps=10, progress=None, damping=1.0)),
    f"{RIVAL}.AdaHessian": Method(of_all(rival("AdaHessian")), wants_graph=True),
    f"{RIVAL}.SophiaH-10": Method(of_all(rival("SophiaH")), period=10, wants_graph=True),
    f"{RIVAL}.Shampoo-10": Method(of_all(rival("Shampoo"), preconditioning_compute_steps=10), period=10),
    f"{RIVAL}.SOAP-10": Method(of_all(rival("SOAP")), period=10),
    f"{RIVAL}.Muon": Method(of_matrices(rival_muon)),
    f"{RIVAL}.Lion": Method(of_all(rival("Lion"))),
}


@dataclass
class Result:
    """What one optimizer did: ratios to a gradient, one of times for each round; or why it did nothing."""

    times: list[float] = field(default_factory=list)
    peak: float = float("nan")
    note: str = ""

    @property
    def time(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.times)


@dataclass
class Measured:
    """One workload: the seconds and bytes of a gradient, and every optimizer."""

    seconds: float
    nbytes: int
    results: dict[str, Result]


def measure(work: Work, names: Sequence[str], rounds: int) -> Measured:
    """Let the optimizers take turns, in a new order each round, and each of their steps with a gradient."""
    results = {name: Result() for name in names}
    gradient = gradient_of(work, copy.deepcopy(work.model))
    unit = peak_of(gradient)  # before .grad is there
    steps = {
        name: step for name in names if (step := _started(work, METHODS[name], results[name])) is not None
    }
    gradients: list[float] = []
    for number in range(rounds):
        for name in random.Random(number).sample(list(steps), len(steps)):
            own = other = 0.0
            for _ in range(max(METHODS[name].period, FEWEST)):
                gradients.append(seconds(gradient))
                other += gradients[-1]
                own += seconds(steps[name])
            results[name].times.append(own / other)
    for name in steps:
        results[name].peak = (
            peak_of(functools.partial(_period, work, METHODS[name], copy.deepcopy(work.model))) / unit
        )
    return Measured(statistics.median(gradients), unit, results)


def seconds(run: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_of(run: Callable[[], object]) -> int:
    """Return the most bytes that a call holds at a time, of what it makes."""
    with MemoryTracker(device="cpu") as tracker, tracker.outer(0):
        run()
    return tracker.peak


def gradient_of(work: Work, model: nn.Module) -> Callable[[], Tensor]:
    """Return what computes a gradient as a training step does."""

    def gradient() -> Tensor:
        model.zero_grad()
        loss = work.loss(model)
        loss.backward()
        return loss.detach()

    return gradient


def _started(work: Work, method: Method, result: Result) -> Callable[[], object] | None:
    """Take the first step, in which state is made; note why it cannot be taken."""
    try:
        step = method.stepper(work, copy.deepcopy(work.model))
        step()
    except ModuleNotFoundError as error:
        result.note = f"{error.name} is not installed"
    except (RuntimeError, TypeError, ValueError) as error:
        result.note = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:90]
    else:
        return step
    return None


def _period(work: Work, method: Method, model: nn.Module) -> None:
    step = method.stepper(work, model)
    for _ in range(method.period + 1):
        step()


def few() -> Work:
    """A network in float64 that is small enough for dense matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Work(model, torch.randn(8, 3, dtype=torch.float64), torch.randint(3, (8,)))


def exact_diagonals(work: Work) -> dict[str, Tensor]:
    """Return the diagonals of the Hessian and the Gauss-Newton matrix, from dense matrices."""
    params = {name: p.detach() for name, p in work.model.named_parameters()}

    def logits(params: dict[str, Tensor]) -> Tensor:
        return functional_call(work.model, params, (work.x,))

    blocks: Any = jacrev(jacrev(lambda params: F.cross_entropy(logits(params), work.y)))(params)
    jacobian = torch.cat([block.flatten(2) for block in jacrev(logits)(params).values()], 2)
    p = logits(params).softmax(1)
    curvature = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / len(p)
    return {
        "Hessian": torch.cat([blocks[n][n].reshape(v.numel(), -1).diagonal() for n, v in params.items()]),
        "Gauss-Newton": torch.einsum("bci,bcd,bdi->i", jacobian, curvature, jacobian),
    }


ESTIMATES: dict[str, tuple[str, Callable[[nn.Module], Optimizers], Callable[[dict[str, Any]], Tensor]]] = {
    "AdaHessian": (
        "Hessian",
        of_all(AdaHessian, betas=(0.9, 0.0), samples=PROBES),
        lambda state: state["square"].sqrt(),
    ),
    "SophiaH-10": ("Hessian", of_all(SophiaH, betas=(0.9, 0.0), samples=PROBES), lambda s: s["hessian"]),
    "SophiaG-10": ("Gauss-Newton", of_all(SophiaG, betas=(0.9, 0.0), samples=PROBES), lambda s: s["hessian"]),
    f"{RIVAL}.AdaHessian": (
        "Hessian",
        of_all(rival("AdaHessian"), num_samples=PROBES),
        lambda state: state["hessian"],
    ),
    f"{RIVAL}.SophiaH-10": ("Hessian", of_all(rival("SophiaH"), num_samples=PROBES), lambda s: s["hessian"]),
}
"""The matrix whose diagonal is estimated, what estimates it at its first step, and where it is in the state."""


def check(names: Sequence[str]) -> list[str]:
    """Compare means of estimates with exact diagonals, and Lion with Lion; say how far off they are.

    Raises:
        SystemExit: One of ours is further off than its standard error explains.
    """
    work, lines = few(), []
    exact = exact_diagonals(work)
    for name in (name for name in names if name in ESTIMATES and _is_there(name)):
        matrix, make, read = ESTIMATES[name]
        model = copy.deepcopy(work.model)
        (opt,) = make(model)
        Method(lambda _, opt=opt: [opt], wants_graph=METHODS[name].wants_graph).stepper(work, model)()
        estimate = torch.cat([read(opt.state[p]).reshape(-1) for p in model.parameters()])
        error = ((estimate.abs() - exact[matrix].abs()).norm() / exact[matrix].norm()).item()
        lines.append(f"{name}: the mean of {PROBES} estimates is off the {matrix} diagonal by {error:.1%}")
        if not error < TOLERANCE and not name.startswith(RIVAL):
            raise SystemExit(f"{lines[-1]}.")
    return lines + _alike(work, [name for name in ("Lion", f"{RIVAL}.Lion") if name in names])


def _alike(work: Work, names: Sequence[str]) -> list[str]:
    if len(names) < 2 or not all(map(_is_there, names)):
        return []
    ends = []
    for name in names:
        model = copy.deepcopy(work.model)
        step = METHODS[name].stepper(work, model)
        for _ in range(3):
            step()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    error = (ends[0] - ends[1]).abs().max().item()
    return [f"{' and '.join(names)}: after 3 steps parameters differ by {error:.1e}, of {3 * LR:.0e} moved"]


def _is_there(name: str) -> bool:
    return not name.startswith(RIVAL) or importlib.util.find_spec(RIVAL) is not None


def table(name: str, measured: Measured) -> str:
    """Format one workload in Markdown, and whether the goals are met."""
    lines = [
        f"## {name}",
        "",
        f"One gradient takes {1000 * measured.seconds:.1f} ms and {measured.nbytes / MIB:.1f} MiB.",
        "",
        f"| {'optimizer':30} | a step, in gradients | in the rounds | peak, in gradients' | goal |",
        f"| {'---':30} | ---: | --- | ---: | --- |",
    ]
    for method, result in measured.results.items():
        cells = f" | | | {result.note}"
        if not result.note:
            spread = f"{min(result.times):.2f} to {max(result.times):.2f}"
            cells = f"{result.time:.2f} | {spread} | {result.peak:.2f} | {goal(method, measured.results)}"
        lines.append(f"| {method:30} | {cells} |")
    return "\n".join(lines)


def goal(method: str, results: dict[str, Result]) -> str:
    """Say what a step should cost at most, and whether it does."""
    own, verdicts = results[method].time, []
    if method in GOALS:
        verdicts.append(_verdict(own <= GOALS[method], f"<= {GOALS[method]:g}"))
    other = results.get(RIVALS.get(method, ""))
    if other is not None and other.times:
        verdicts.append(_verdict(own <= other.time, f"<= {RIVAL}'s {other.time:.2f}"))
    return ", ".join(verdicts)


def _verdict(is_met: bool, text: str) -> str:
    return f"{text}: {'met' if is_met else 'MISSED'}"


def chart(path: Path, everything: dict[str, Measured]) -> None:
    """Draw what a step costs in gradients and what it holds, a row for each workload."""
    rows = {name: {m: r for m, r in found.results.items() if r.times} for name, found in everything.items()}
    heights = [len(results) + 1.5 for results in rows.values()]
    size = (10.0, 0.24 * sum(heights) + 0.6)
    with figure(path, len(rows), 2, size=size, height_ratios=heights) as axes:
        for (time, memory), (name, results) in zip(axes, rows.items(), strict=True):
            _bars(time, list(results), [r.time for r in results.values()], BLUE)
            _bars(memory, list(results), [r.peak for r in results.values()], SKY)
            memory.set_yticklabels([])
            time.set_title(f"{name}: time of a step, in gradients")
            memory.set_title("peak memory, in gradients'")


def _bars(axis: Any, labels: list[str], values: list[float], color: str) -> None:
    bars = axis.barh(range(len(labels)), values, color=color, height=0.7)
    axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, color=INK)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.axvline(1.0, color=MUTED, linewidth=0.8)
    axis.set_xlim(0, 1.15 * max(values, default=1.0))
    axis.grid(axis="x")


def write(folder: Path, checked: list[str], everything: dict[str, Measured]) -> None:
    """Write what has been measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "provenance": provenance.start(seed=0),
        "checks": checked,
        "workloads": {name: asdict(measured) for name, measured in everything.items()},
    }
    (folder / "optimizers.json").write_text(json.dumps(record, indent=2) + "\n")
    tables = [table(name, measured) for name, measured in everything.items()]
    (folder / "optimizers.md").write_text("\n\n".join(["\n".join(checked), *tables]) + "\n")
    chart(folder / "optimizers.png", everything)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_optimizers",
        description="What a step of an optimizer costs, in gradients.",
    )
    add = parser.add_argument
    add("--workloads", nargs="+", default=list(WORKLOADS), help=f"any of {', '.join(WORKLOADS)} (all)")
    add("--optimizers", nargs="+", default=list(METHODS), help=f"any of {', '.join(METHODS)} (all)")
    add("--rounds", type=int, default=3, help="periods of each optimizer (3)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch (as many as it takes)")
    add("--out", type=Path, default=Path("outputs/bench_optimizers"), help="where optimizers.* go")
    arguments = parser.parse_args()
    for chosen, known in ((arguments.workloads, WORKLOADS), (arguments.optimizers, METHODS)):
        unknown = [name for name in chosen if name not in known]
        if unknown:
            parser.error(f"{', '.join(unknown)}: expected any of {', '.join(known)}")
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be positive")
    return arguments


def main() -> None:
    """Check, then measure what the command line names, by default everything."""
    arguments = parsed()
    warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
    warnings.filterwarnings("ignore", "KFAC")  # names the parameters of norms, which follow the gradient
    torch.set_num_threads(arguments.threads)
    checked, everything = check(arguments.optimizers), {}
    print("\n".join(checked), end="\n\n", flush=True)
    for name in arguments.workloads:
        everything[name] = measure(WORKLOADS[name](), arguments.optimizers, arguments.rounds)
        print(table(name, everything[name]), end="\n\n", flush=True)
        write(arguments.out, checked, everything)


if __name__ == "__main__":
    main()
