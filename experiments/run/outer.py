"""The outer step: the loss after adaptation, its gradient, and a step of any optimizer, with or without a closure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.run.ranks import Ranks, counted

if TYPE_CHECKING:
    from experiments.run.build import Parts
    from metagrad.meta import MetaOutput
    from metagrad.tasks import Batch

Phase = Callable[[str], AbstractContextManager[Any]]


def step(parts: Parts, batch: Batch, phase: Phase, ranks: Ranks | None = None) -> MetaOutput | None:
    """Adapt to the tasks of a batch, update the meta-parameters, and return the output from before the update.

    Each process has a share of the batch, and all processes use the gradient of the whole batch. If
    `nonfinite="skip"` and no task of this process is finite, the result is None and the process uses the gradient
    of the other processes.
    """
    if parts.takes_closure:
        return _step_by_closure(parts, batch, phase)
    parts.optimizer.zero_grad(set_to_none=True)
    ranks, out, failures = ranks or Ranks(), None, []
    may_fail = ranks.size > 1 and getattr(parts.algorithm, "nonfinite", "raise") == "skip"
    with _noted(failures) if may_fail else nullcontext():
        out = parts.algorithm(batch)
    # Before the backward pass, which may mark more tasks as skipped.
    weight = 0 if out is None else 1 if ranks.size == 1 else counted(out)
    if may_fail and not ranks.total(weight):
        raise failures[0]
    with phase("backward"), ranks.averaging(parts.module, weight):
        if out is not None:
            with _noted(failures) if may_fail else nullcontext():
                # Second-order optimizers measure the curvature here, while the graph of the loss exists.
                getattr(parts.optimizer, "backward", Tensor.backward)(out.loss)
    if failures and all(p.grad is None for p in parts.module.parameters()):
        raise failures[0]
    with phase("optimizer"):
        parts.optimizer.step()
    return None if failures else out


@contextmanager
def _noted(failures: list[FloatingPointError]) -> Iterator[None]:
    """Record that no task of this process is finite, so that the other processes can continue."""
    try:
        yield
    except FloatingPointError as error:
        failures.append(error)


def _step_by_closure(parts: Parts, batch: Batch, phase: Phase) -> MetaOutput:
    first: list[Any] = []

    def closure() -> Tensor:
        parts.optimizer.zero_grad()
        try:
            out = parts.algorithm(batch)
        except FloatingPointError:
            if not first:
                raise
            loss = _infinite(parts)  # a trial step that was too long, which the optimizer rejects
        else:
            first.append(out if not first else None)
            loss = known_loss(parts, batch, out)
        loss.backward()
        return loss

    with phase("optimizer"):
        parts.optimizer.step(closure)  # type: ignore[reportArgumentType]  # torch's stub says float
    return first[0]


def known_loss(parts: Parts, batch: Batch, out: MetaOutput) -> Tensor:
    """Return the loss as one call of the loss function if this has the same value.

    Gauss-Newton and Fisher methods look for one call of the loss, on predictions without a `vmap` axis. The value is
    the same for a mean over examples if all tasks have the same number of examples.
    """
    kept = ~out.skipped
    predictions, targets = out.query_outputs[kept], batch.query.y[kept]
    whole = parts.loss_fn(predictions.flatten(0, 1), targets.flatten(0, 1))
    # The predictions of Reptile have no graph. Its loss has the difference of parameters as its gradient.
    return whole if whole.requires_grad and torch.allclose(whole, out.loss, rtol=1e-4) else out.loss


def _infinite(parts: Parts) -> Tensor:
    return torch.stack([0 * p.sum() for p in parts.module.parameters()]).sum() + math.inf
