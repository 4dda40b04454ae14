"""Whether tasks that are stacked compute what they would one after the other: found out by computing two both ways.

What torch.vmap cannot take raises. What stays silent shows here: a module that carries something from call to call
(a buffer, an attribute, a number of Python's random generator), which would happen once for all stacked tasks; and
an operation that torch.vmap computes otherwise, in values, gradients or gradients of gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.recompute.captured_tensors import unrecorded
from metagrad.meta.module_state import GeneratorStates, ModuleState
from metagrad.meta.tables import find_rows
from metagrad.meta.vmapped import NotStackableError
from metagrad.optim.rules import Params
from metagrad.sparse.tables.embedding import embedding

if TYPE_CHECKING:
    from metagrad.meta.batching import Tasks
    from metagrad.meta.objective import Labels, Objective

Derivatives: TypeAlias = "dict[str, list[Tensor]]"

_TF32 = 2.0**-10  # the rounding of products on a CUDA device
_ANOTHER = 1.01  # what parameters of the second task are multiplied by, so that no task has another's


def difference(
    objective: Objective,
    params: Params,
    tasks: Tasks,
    labels: Labels | None,
    sparse: Sequence[str],
    order: int,
) -> str | None:
    """Say why tasks must run one after the other, or None if they may be stacked.

    The losses of two tasks and their gradients are computed both ways, once, on what the tasks start from. It leaves
    nothing behind: buffers, attributes of modules and random generators are set back.

    Args:
        objective: The loss.
        params: What tasks start from.
        tasks: Two tasks or more.
        labels: The bounds of the labels.
        sparse: The names of tables of which tasks have rows.
        order: Of the derivatives of the loss: 2 compares a gradient of the gradient too.
    """
    with unrecorded(), torch.enable_grad():
        state, generators = ModuleState([objective.model, objective.loss_fn]), GeneratorStates()
        few = _Few(objective, params, tasks.select(slice(0, 2)), sparse)
        with generators.watched():
            expected = _attempt(lambda: few.each(labels, order, between=state.note_attributes))
        reason = state.changed() or generators.drawn_elsewhere()
        is_random = generators.torch_has_drawn()
        state.restore()
        generators.restore()
        if reason is not None or is_random:
            return reason
        if isinstance(expected, Exception):
            return None  # the loop's own error, which is to be raised where it comes again
        found = _attempt(lambda: few.together(labels, order))
        state.restore()
        generators.restore()
        return vmap_reason(found) if isinstance(found, Exception) else _comparison(found, expected)


def _attempt(compute: Callable[[], Derivatives]) -> Derivatives | Exception:
    try:
        return compute()
    except Exception as error:
        return error


def vmap_reason(error: Exception) -> str:
    """Say in a line why torch.vmap could not take a model."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        lines[0] if isinstance(error, NotStackableError) else f"torch.vmap cannot take the model: {lines[0]}"
    )


class _Few:
    """Two tasks, and what each starts from."""

    def __init__(self, objective: Objective, params: Params, tasks: Tasks, sparse: Sequence[str]) -> None:
        self.objective, self.tasks = objective, tasks
        self.rows = find_rows(objective.model, sparse, [tasks.support_x], chunk=1)
        self.starts = {name: _two(p.detach(), self.rows.get(name)) for name, p in params.items()}

    def each(self, labels: Labels | None, order: int, between: Callable[[], None]) -> Derivatives:
        """Compute one task after the other; ``between`` is called after the first."""
        losses = []
        for i, task in enumerate(self.tasks.each()):
            objective = dataclasses.replace(
                self.objective, rows={n: rows[i] for n, rows in self.rows.items()}
            )
            params = {name: start[i] for name, start in self.starts.items()}
            losses.append(objective.single(params, task.support_x, task.support_y, labels)[0])
            if i == 0:
                between()
        return self._derivatives(torch.stack(losses), order)

    def together(self, labels: Labels | None, order: int) -> Derivatives:
        """Compute both at once."""
        objective = dataclasses.replace(self.objective, rows=self.rows)
        x, y = self.tasks.support_x, self.tasks.support_y
        return self._derivatives(objective.stacked(self.starts, x, y, labels)[0], order)

    def _derivatives(self, losses: Tensor, order: int) -> Derivatives:
        starts = list(self.starts.values())
        grads = _gradients(losses.sum(), starts, create_graph=order == 2)
        found = {"losses": [losses], "gradients": grads}
        if order == 2:
            norm = torch.stack([gradient.square().sum() for gradient in grads]).sum()
            found["second derivatives"] = _gradients(norm, starts) if norm.requires_grad else []
        return found


def _two(param: Tensor, rows: Tensor | None) -> Tensor:
    """Return what two tasks start from."""
    pair = torch.stack([param, param]) if rows is None else embedding(rows, param)
    pair[1] *= _ANOTHER
    return pair.requires_grad_()


def _gradients(value: Tensor, starts: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    grads = torch.autograd.grad(value, starts, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(starts, grads, strict=True)]


def _comparison(found: Derivatives, expected: Derivatives) -> str | None:
    for name, tensors in expected.items():
        if not _are_close(found[name], tensors):
            return f"its {name} by torch.vmap are not those of one task after the other"
    return None


@torch.no_grad()
def _are_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Compare as one vector each; what is not finite says nothing."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return False
    if not expected:
        return True
    scale, distance = (
        torch.stack([t.double().norm() for t in tensors]).norm().item()
        for tensors in (expected, [a.double() - b.double() for a, b in zip(found, expected, strict=True)])
    )
    tolerance = max(_tolerance(tensor) for tensor in expected)
    return not math.isfinite(scale) or distance <= tolerance * scale


def _tolerance(tensor: Tensor) -> float:
    """Return how far two orders of the same sums may lie apart, relatively."""
    eps = torch.finfo(tensor.dtype).eps
    if tensor.is_cuda and tensor.dtype == torch.float32:
        eps = _TF32
    if torch.is_autocast_enabled(tensor.device.type):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(tensor.device.type)).eps)
    return eps**0.4
