"""The methods that compute a meta-gradient, by name: the naive loop, metagrad, and other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import metagrad as mg
from experiments.benchmarks.maml import rival_jax
from experiments.benchmarks.maml.workloads import Workload
from metagrad.core.budget import Memory
from metagrad.tasks import Batch

BASELINE = "naive loop"
LONGEST_GRAPH = 5  # steps of a compiled graph, since more steps take minutes to compile


class RefusedError(Exception):
    """Raised with a reason if a method does not support a workload."""


class Prepared(NamedTuple):
    """A method that is ready to run.

    Attributes:
        run: Computes the meta-gradient, one array for each parameter.
        peak: The peak in bytes that a compiler reports. None if it must be measured.
    """

    run: Callable[[], Sequence[Any]]
    peak: int | None = None


@dataclass(frozen=True)
class Method:
    """A method that computes a meta-gradient.

    Attributes:
        prepare: Prepares a workload, like a training loop before its first step.
        package: The package that must be installed.
    """

    prepare: Callable[[Workload], Prepared]
    package: str = ""


def of_loss(loss_of: Callable[[Workload], Tensor]) -> Method:
    """Return a method for a function that computes the differentiable meta-objective."""

    def prepare(work: Workload) -> Prepared:
        return Prepared(lambda: torch.autograd.grad(loss_of(work), list(work.params.values())))

    return Method(prepare)


def naive_loop(work: Workload) -> Tensor:
    """Loop over tasks and steps, with create_graph=True."""
    losses = []
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        fast = work.adapted
        for _ in range(work.steps):
            loss = work.loss_fn(functional_call(work.model, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - work.lr * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        losses.append(work.loss_fn(functional_call(work.model, fast, (query_x,)), query_y))
    return torch.stack(losses).mean()


def torch_func(work: Workload) -> Tensor:
    """Differentiate the steps of one task by torch.func.grad, and batch tasks by torch.vmap."""
    return _by_torch_func(work, work.params, work.batch)


def _by_torch_func(work: Workload, params: dict[str, Tensor], batch: Batch) -> Tensor:
    """Compute the meta-objective as a function of the meta-parameters."""

    def loss_of(fast: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return work.loss_fn(functional_call(work.model, {**params, **fast}, (x,)), y)

    def task(x: Tensor, y: Tensor, query_x: Tensor, query_y: Tensor) -> Tensor:
        fast = {name: params[name] for name in work.adapted}
        for _ in range(work.steps):
            grads = grad(loss_of)(fast, x, y)
            fast = {name: p - work.lr * grads[name] for name, p in fast.items()}
        return loss_of(fast, query_x, query_y)

    return vmap(task)(*batch.support, *batch.query).mean()


def prepare_by_hand(work: Workload) -> Prepared:
    """Compile the meta-gradient as one function of torch.func, written by hand for one model and batch size."""
    if work.steps > LONGEST_GRAPH:
        raise RefusedError(f"one graph of {work.steps} steps takes minutes to compile")

    def objective(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return _by_torch_func(work, params, batch)

    compiled = torch.compile(grad(objective), fullgraph=True)
    params = {
        name: p.detach() for name, p in work.params.items()
    }  # torch.compile would differentiate once more
    return Prepared(lambda: list(compiled(params, work.batch).values()))


def prepare_maml(
    work: Workload, memory: Memory, compile: bool = False, *, together: bool = False, rows: bool = False
) -> Prepared:
    """Create a MAML once, as a training loop does. `memory="budget"` means the budget of the workload."""
    tables = [f"{name}.weight" for name, m in work.model.named_modules() if isinstance(m, nn.Embedding)]
    if rows and not tables:
        raise RefusedError("the model has no embedding tables")
    if together and not isinstance(work.model, mg.models.Conv4):
        raise RefusedError("the tasks of this model run together anyway")
    maml = mg.MAML(
        work.model,
        work.loss_fn,
        inner=mg.optim.rules.sgd(lr=work.lr),
        steps=work.steps,
        memory=work.budget if memory == "budget" else memory,
        task_chunk=work.batch.num_tasks if together else None,
        sparse=tables if rows else (),
        compile=compile,
        adapt=work.adapt or None,
    )
    return Prepared(lambda: torch.autograd.grad(maml(work.batch).loss, list(work.params.values())))


def higher_loop(work: Workload) -> Tensor:
    """Loop over tasks by higher's inner-loop context (Grefenstette et al. 2019)."""
    import higher  # type: ignore[reportMissingImports]

    losses = []
    inner = torch.optim.SGD(work.model.parameters(), lr=work.lr)
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        with higher.innerloop_ctx(work.model, inner, copy_initial_weights=False) as (fast, optimizer):
            for _ in range(work.steps):
                optimizer.step(work.loss_fn(fast(x), y))
            losses.append(work.loss_fn(fast(query_x), query_y))
    return torch.stack(losses).mean()


def learn2learn_loop(work: Workload) -> Tensor:
    """Loop over tasks by learn2learn's clones (Arnold et al. 2020). Only the adapted part is cloned."""
    import learn2learn  # type: ignore[reportMissingImports]

    layers = dict(work.model.named_children()) if work.adapt else {}
    maml = learn2learn.algorithms.MAML(layers.pop(work.adapt, work.model), lr=work.lr)
    features = nn.Sequential(*layers.values())
    losses = []
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        fast, support = maml.clone(), features(x)
        for _ in range(work.steps):
            fast.adapt(work.loss_fn(fast(support), y))
        losses.append(work.loss_fn(fast(features(query_x)), query_y))
    return torch.stack(losses).mean()


def torchopt_loop(work: Workload) -> Tensor:
    """Loop over tasks by TorchOpt's differentiable optimizer (Ren et al. 2023), taken back after each task."""
    import torchopt  # type: ignore[reportMissingImports]

    losses = []
    inner = torchopt.MetaSGD(work.model, lr=work.lr)
    start = [torchopt.extract_state_dict(part, by="reference") for part in (work.model, inner)]
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        for _ in range(work.steps):
            inner.step(work.loss_fn(work.model(x), y))
        losses.append(work.loss_fn(work.model(query_x), query_y))
        for part, state in zip((work.model, inner), start, strict=True):
            torchopt.recover_state_dict(part, state)
    return torch.stack(losses).mean()


def prepare_jax(work: Workload, *, checkpoint: bool) -> Prepared:
    """Compile the meta-gradient by JAX."""
    if not isinstance(work.model, (mg.models.MLP, mg.models.Conv4)):
        raise RefusedError("the model is not written in JAX")
    return Prepared(*rival_jax.compiled(work, checkpoint=checkpoint))


MEMORY: tuple[str, ...] = ("full", "step", "sqrt", "budget")

METHODS: dict[str, Method] = {
    BASELINE: of_loss(naive_loop),
    **{f'metagrad, "{memory}"': Method(partial(prepare_maml, memory=memory)) for memory in MEMORY},
    **{
        f'metagrad, "{memory}", compiled': Method(partial(prepare_maml, memory=memory, compile=True))
        for memory in MEMORY
    },
    "metagrad, tasks together": Method(partial(prepare_maml, memory="full", together=True)),
    "metagrad, rows of tables": Method(partial(prepare_maml, memory="full", rows=True)),
    "torch.func grad + vmap": of_loss(torch_func),
    "torch.func, one compiled function": Method(prepare_by_hand),
    "higher": Method(of_loss(higher_loop).prepare, "higher"),
    "learn2learn": Method(of_loss(learn2learn_loop).prepare, "learn2learn"),
    "TorchOpt": Method(of_loss(torchopt_loop).prepare, "torchopt"),
    "JAX jit": Method(partial(prepare_jax, checkpoint=False), "jax"),
    "JAX jit, checkpoint": Method(partial(prepare_jax, checkpoint=True), "jax"),
}
"""The methods that run on every workload, and `BASELINE`, the method that they are compared with."""


def is_ours(name: str) -> bool:
    """Return whether a method must be correct before anything is timed."""
    return name.startswith("metagrad")
