"""Ways to the gradient of a query loss through inner steps, the meta-gradient of MAML on one task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import metagrad as mg
from experiments.run.allocations import held_bytes
from experiments.studies.overhead.run import Run
from experiments.studies.overhead.work import Work
from metagrad.tasks import Batch, Examples

RATE = 0.05  # of the inner steps, which are gradient descent


def task(work: Work) -> Batch:
    """Return the examples as a batch of one task."""
    support, query = Examples(work.x[None], work.y[None]), Examples(work.query_x[None], work.query_y[None])
    return Batch(support, query)


def maml(work: Work, **options: Any) -> Run:
    """The graph of the query loss is held, with as much of the inner steps as `memory` says."""
    learner = mg.MAML(
        work.model,
        work.loss_fn,
        inner=mg.optim.rules.sgd(lr=RATE),
        steps=work.steps,
        sparse=work.tables,
        **options,
    )
    batch, params = task(work), list(work.params.values())
    return Run(lambda: learner(batch).loss, lambda loss: torch.autograd.grad(loss, params))


def half_of_full(work: Work) -> Run:
    """A budget of half of what all graphs take."""
    return maml(work, memory=held_bytes(maml(work).hold, work.x.device) // 2)


def loop(work: Work) -> Run:
    """The textbook's loop, of torch alone."""
    params = work.params

    def hold() -> Tensor:
        fast = params
        for _ in range(work.steps):
            grads = torch.autograd.grad(
                work.loss(fast, work.x, work.y), list(fast.values()), create_graph=True
            )
            fast = {name: p - RATE * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        return work.loss(fast, work.query_x, work.query_y)

    return Run(hold, lambda loss: torch.autograd.grad(loss, list(params.values())))


INNER_WAYS: dict[str, Callable[[Work], Run]] = {
    "": maml,
    "step": partial(maml, memory="step"),
    "sqrt": partial(maml, memory="sqrt"),
    "half the bytes": half_of_full,
    "auto": partial(maml, memory="auto"),
    "compiled": partial(maml, compile=True),
    "step, compiled": partial(maml, memory="step", compile=True),
    "first order": partial(maml, order=1),
    "textbook loop": loop,
}
"""By the remedy; the first keeps every graph, as the loop does."""
