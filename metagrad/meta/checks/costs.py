"""What a step costs in memory: measured on few inner steps, and computed from these for all."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.unrolling.schedule import segments_of
from metagrad.memory.tracker import MemoryTracker
from metagrad.meta.checks.report import MemoryCost
from metagrad.meta.checks.subject import Subject
from metagrad.meta.maml import MAML
from metagrad.meta.objective.tasks import Tasks

Mode: TypeAlias = Literal["full", "step", "sqrt"]
_MODES: tuple[Mode, ...] = ("full", "step", "sqrt")
_UNKNOWN = 2  # meta-steps until the derivative of all that is recomputed is known, and needs less
_MEASURED = 3  # the most steps of a loop that is measured as it is


class Costs(NamedTuple):
    """What was measured, and why something was not.

    Attributes:
        memory: By the name of the row.
        notes: Sentences.
    """

    memory: dict[str, MemoryCost]
    notes: list[str]


def meta_costs(maml: MAML, batch: Any, tasks: Tasks, steps: int) -> Costs:
    """Measure a meta-step, forward and backward, in every memory mode."""
    costs = Costs({}, [])
    differentiated = steps if maml.truncate is None else min(maml.truncate, steps)
    for mode in _MODES if maml.hypergradient is None else ("full",):
        step = functools.partial(_meta_step, maml, mode, batch, tasks.device)
        with _noted(costs, f"memory={mode!r}"):
            if steps <= _MEASURED:
                costs.memory[mode] = step(steps)
            else:
                computed = _segmented if mode == "sqrt" else _straight
                costs.memory[mode] = computed(step, differentiated)
    return costs


def _straight(step: Callable[[int], MemoryCost], steps: int) -> MemoryCost:
    """Return the cost where every step after the second adds what the third does."""
    second, third = step(2), step(3)
    held, peak = third.held - second.held, third.peak - second.peak
    more = steps - 2
    return MemoryCost(second.held + more * held, second.peak + more * peak, extrapolated=True)


def _segmented(step: Callable[[int], MemoryCost], steps: int) -> MemoryCost:
    """Return the cost where there is a state for each segment, and one for each step in the segment that is swept.

    Two steps are two segments of one, three steps three, and four are two segments of two. What a step keeps besides,
    in whatever segment, shows as well.
    """
    second, third, fourth = step(2), step(3), step(4)
    each = (fourth.held - second.held) // 2
    state = third.held - second.held - each
    within = fourth.peak - second.peak - 2 * each
    width, left = segments_of(steps)
    more = (left + steps // width - 2) * state + (steps - 2) * each
    return MemoryCost(second.held + more, second.peak + more + (width - 1) * within, extrapolated=True)


def _meta_step(maml: MAML, mode: Mode, batch: Any, device: torch.device, steps: int) -> MemoryCost:
    probe = maml.keeping(mode)
    params = [p for p in maml.parameters() if p.requires_grad]
    with warnings.catch_warnings():
        # What the findings say already: that tasks run one by one, or nothing is compiled.
        warnings.simplefilter("ignore")
        probe(batch, steps=min(steps, 1))
        for _ in range(0 if mode == "full" else _UNKNOWN):
            torch.autograd.grad(probe(batch, steps=steps).loss, params, allow_unused=True)
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
def _noted(costs: Costs, what: str) -> Generator[None]:
    """Turn an error into a note."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        costs.notes.append(f"the memory of {what} was not measured: {lines[0]}")
