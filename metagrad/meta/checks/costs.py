"""What a step costs in memory: measured on few inner steps, and computed from these for all."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.blocks.chain import chain
from metagrad.autograd.unrolling.schedule import segments_of
from metagrad.memory.tracker import MemoryTracker
from metagrad.meta.checks.report import MemoryCost
from metagrad.meta.checks.subject import Subject
from metagrad.meta.maml import MAML
from metagrad.meta.objective.tasks import Tasks

Mode: TypeAlias = Literal["full", "step", "sqrt", "block"]
_MODES: tuple[Mode, ...] = ("full", "step", "sqrt", "block")
_SHORT = (2, 3)  # steps: the first differs from those after it, which are alike


class Costs(NamedTuple):
    """What was measured, and why something was not.

    Attributes:
        memory: By the name of the row.
        notes: Sentences.
    """

    memory: dict[str, MemoryCost]
    notes: list[str]


class _Line(NamedTuple):
    """Costs of two numbers of steps: each further step adds the same."""

    first: MemoryCost
    second: MemoryCost

    def held(self, steps: int) -> int:
        return self.first.held + (steps - _SHORT[0]) * (self.second.held - self.first.held)

    def peak(self, steps: int) -> int:
        return self.first.peak + (steps - _SHORT[0]) * (self.second.peak - self.first.peak)


def meta_costs(maml: MAML, batch: Any, tasks: Tasks, steps: int) -> Costs:
    """Measure a meta-step, forward and backward, in every memory mode that the model can be used in."""
    costs = Costs({}, [])
    lines: dict[Mode, _Line] = {}
    differentiated = steps if maml.truncate is None else min(maml.truncate, steps)
    for mode in _MODES:
        if mode == "block" and not _is_chain(maml, tasks):
            continue
        with _noted(costs, f"memory={mode!r}"):
            if steps <= _SHORT[1]:
                costs.memory[mode] = _meta_step(maml, mode, batch, steps, tasks.device)
            elif mode == "sqrt":
                costs.memory[mode] = _segmented(lines["step"], differentiated)
            else:
                lines[mode] = _Line(*(_meta_step(maml, mode, batch, n, tasks.device) for n in _SHORT))
                held, peak = lines[mode].held(differentiated), lines[mode].peak(differentiated)
                costs.memory[mode] = MemoryCost(held, peak, extrapolated=True)
    return costs


def _segmented(step: _Line, steps: int) -> MemoryCost:
    """Return the cost of keeping one state a segment, and one a step within the segment that is swept."""
    width, left = segments_of(steps)
    states = left + steps // width
    return MemoryCost(step.held(states), step.peak(states + width), extrapolated=True)


def _is_chain(maml: MAML, tasks: Tasks) -> bool:
    if not tasks.are_tensors or maml.sparse:
        return False
    try:
        chain(maml.model, maml.loss_fn)
    except ValueError:
        return False
    return True


def _meta_step(maml: MAML, mode: Mode, batch: Any, steps: int, device: torch.device) -> MemoryCost:
    probe = maml.keeping(mode)
    params = [p for p in maml.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        # What the findings say already: that tasks run one by one, or nothing is compiled.
        warnings.simplefilter("ignore")
        probe(batch, steps=min(steps, 1))
        return measured(lambda: probe(batch, steps=steps).loss, params, device)


def plain_costs(subject: Subject, order: int) -> Costs:
    """Measure the derivatives of a loss, each a product with the one below."""
    costs = Costs({}, [])
    device = subject.params[0].device
    for k in range(1, order + 1):
        if costs.notes:
            break
        with _noted(costs, f"order {k}"):
            costs.memory[f"order {k}"] = measured(lambda k=k: _nested(subject, k), subject.params, device)
    return costs


def _nested(subject: Subject, order: int) -> Tensor:
    """Return a scalar whose gradient is a derivative of an order."""
    value = subject.loss()
    for _ in range(order - 1):
        grads = torch.autograd.grad(value, subject.params, create_graph=True, materialize_grads=True)
        value = torch.stack([gradient.square().sum() for gradient in grads]).sum()
    return value


def measured(forward: Callable[[], Tensor], params: list[Any], device: torch.device) -> MemoryCost:
    """Measure a scalar and its gradient, from what is in use before."""
    with MemoryTracker(device) as tracker:
        with tracker.phase("forward"):
            value = forward()
        with tracker.phase("backward"):
            torch.autograd.grad(value, params, allow_unused=True)
        before, *_ = (record for record in tracker.records() if not record.depth)
    return MemoryCost(before.after - before.before, tracker.peak - before.before)


@contextlib.contextmanager
def _noted(costs: Costs, what: str) -> Iterator[None]:
    """Turn an error into a note."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, FloatingPointError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        costs.notes.append(f"the memory of {what} was not measured: {lines[0]}")
