"""How many tasks run together: all at once, vmapped over stacked parameters, or one by one where the two differ.

To find out, two tasks are computed both ways. What torch.vmap cannot take raises. What stays silent shows in a
comparison: a module that carries something from call to call (a buffer, an attribute, a number of Python's random
generator), which would happen once for all stacked tasks; and an operation that torch.vmap computes otherwise, in
values, gradients or gradients of gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from metagrad.autograd.recompute.captured_tensors import unrecorded
from metagrad.core import _torch
from metagrad.core._torch import named_modules
from metagrad.core.budget import BudgetError
from metagrad.core.capture import RandomState
from metagrad.core.checks import warn
from metagrad.core.modules import WatchedModules, buffer_versions
from metagrad.core.tree import zeros_for_none
from metagrad.meta.execution.tables import find_rows
from metagrad.meta.inner.start import OwnStart
from metagrad.meta.objective.norms import normalised
from metagrad.meta.objective.task_loss import TaskLoss
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.objective.vmap import NotStackableError
from metagrad.optim.rules import Params
from metagrad.sparse.tables.embedding import embedding

Derivatives: TypeAlias = "dict[str, list[Tensor]]"

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EVERYWHERE: Any = torch.nn.modules.module
_MOST_STRUCTURES = 64
_RUNNING_STATISTICS = (_torch.BatchNorm, _torch.InstanceNorm)
_TF32 = 2.0**-10  # the rounding of products on a CUDA device
_ANOTHER = 1.01  # what parameters of the second task are multiplied by, so that no task has another's


class Stacking:
    """Decides how many tasks run together, and remembers for each structure of the model what it found.

    Args:
        task_chunk: What the user asked for; None leaves the choice to what was measured.
        name: Of the algorithm, in warnings and errors.
    """

    def __init__(self, task_chunk: int | None, name: str = "MAML") -> None:
        self.task_chunk = task_chunk
        self.name = name
        self.vmap_ran = False
        self._must_loop = False
        self._stackable: dict[Hashable, bool] = {}
        self._reasons: set[str] = set()

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is known by the identity of modules."""
        return {**self.__dict__, "_stackable": {}}

    def chunk_size(self, count: int, structure: Hashable, comparison: Callable[[], Comparison]) -> int:
        """Return how many tasks to compute together; 1 means one by one, without vmap.

        Args:
            count: The number of tasks.
            structure: What changes when they must be examined again, see :func:`structure_of`.
            comparison: Returns what shows whether they may be stacked.
        """
        if count == 1 or self.task_chunk == 1 or self._must_loop:
            return 1
        if structure not in self._stackable:
            if len(self._stackable) == _MOST_STRUCTURES:
                self._stackable.clear()
            self._stackable[structure] = self._examine(comparison())
        return min(self.task_chunk or count, count) if self._stackable[structure] else 1

    def _examine(self, comparison: Comparison) -> bool:
        model = comparison.objective.model
        device_type = comparison.tasks.device.type
        if self.task_chunk is None and prefers_loop(model, device_type, comparison.params):
            return False
        reason = loop_reason(model, comparison.objective.norms is not None)
        if reason is None and not _torch.functorch_is_active():
            reason = comparison.difference()
        if reason is not None:
            self._warn(reason)
        return reason is None

    def give_up(self, reason: str) -> None:
        """Run tasks one by one from here on."""
        self._must_loop = True
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if reason in self._reasons:
            return
        self._reasons.add(reason)
        warn(
            f"{self.name}: the tasks of a batch run one by one, because {reason}. "
            "Pass task_chunk=1 to choose this without a warning."
        )


class Attempt:
    """A context in which tasks run together, and in which torch.vmap may turn out not to take the model.

    Attributes:
        reason: Why the tasks must run one by one, where that turned out: the error is then suppressed.
    """

    def __init__(self, stacking: Stacking, model: nn.Module, chunk: int) -> None:
        self.stacking, self.model, self.is_stacked = stacking, model, chunk != 1
        self.reason = ""

    def __enter__(self) -> Attempt:
        if self.is_stacked:
            self._versions = buffer_versions(self.model)
            self._random_state = None if self.stacking.vmap_ran else RandomState()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not self.is_stacked:
            return False
        if error is not None:
            if self._random_state is None or not _is_of_vmap(error):
                return False
            self._random_state.restore()
            self.reason = vmap_reason(error)
            return True
        self.stacking.vmap_ran = True
        if buffer_versions(self.model) != self._versions:
            raise RuntimeError(
                f"{self.stacking.name}: the model writes into a buffer, which it did not do when it was examined on "
                "its first batch. "
                "Stacked tasks did so once for all of them; pass task_chunk=1, and they run one after the other."
            )
        return False


def _is_of_vmap(error: BaseException) -> bool:
    """Say whether an error may be torch.vmap's; if it is the model's own, the loop will raise it again."""
    return isinstance(error, Exception) and not isinstance(error, (torch.OutOfMemoryError, BudgetError))


def structure_of(model: nn.Module) -> Hashable:
    """Return what changes when modules, hooks or flags of a model do."""
    return (
        tuple(
            (
                id(module),
                *module._forward_hooks,
                *module._forward_pre_hooks,
                *module._backward_hooks,
                *module._backward_pre_hooks,
                *(value for value in vars(module).values() if value is None or type(value) in (bool, str)),
            )
            for module in model.modules()
        ),
        *_EVERYWHERE._global_backward_hooks,
        *_EVERYWHERE._global_backward_pre_hooks,
    )


def prefers_loop(model: nn.Module, device_type: str, params: Params) -> bool:
    """Say whether tasks one by one are faster than all at once.

    With weights of its own for each task a vmapped convolution becomes a grouped one, which on CPU costs twice
    as much as one convolution after the other (``python -m experiments.benchmarks.maml`` prints both). One whose
    weights the tasks share is one convolution of all their examples.

    Args:
        model: The model.
        device_type: Where it is.
        params: The parameters that adapt.
    """
    adapted = {id(p) for p in params.values()}
    own = (module for module in model.modules() if any(id(p) in adapted for p in module.parameters()))
    return device_type == "cpu" and any(isinstance(module, _CONVOLUTIONS) for module in own)


def has_convolutions(modules: Iterable[nn.Module]) -> bool:
    """Say whether there is a convolution among modules and those within."""
    return any(isinstance(inner, _CONVOLUTIONS) for module in modules for inner in module.modules())


def loop_reason(model: nn.Module, has_norm_policy: bool = False) -> str | None:
    """Say why torch.vmap cannot take a model, where that shows without trying."""
    if _EVERYWHERE._global_backward_hooks or _EVERYWHERE._global_backward_pre_hooks:
        return "torch.vmap passes the backward hooks of all modules by"
    reasons = (own_loop_reason(name, module, has_norm_policy) for name, module in named_modules(model))
    return next(filter(None, reasons), None)


def own_loop_reason(name: str, module: nn.Module, has_norm_policy: bool = False) -> str | None:
    """Say so of a module without its children."""
    kind = f"{type(module).__name__} ({name or 'the model itself'})"
    if isinstance(module, nn.RNNBase):
        return f"torch.vmap has no rule for {kind}"
    if module._backward_hooks or module._backward_pre_hooks:
        return f"torch.vmap passes the backward hooks of {kind} by"
    if has_running_statistics(module) and not has_norm_policy:
        return (
            f"{kind} updates running statistics, which all tasks share "
            '(norm="running" moves them once for all; norm="transductive" uses those of each batch)'
        )
    return None


def has_running_statistics(module: nn.Module) -> bool:
    """Say whether a call of a module updates running statistics."""
    return isinstance(module, _RUNNING_STATISTICS) and module.training and module.track_running_stats


@dataclass(frozen=True)
class Comparison:
    """What it takes to compute the losses of two tasks and their gradients both ways, on what the tasks start from.

    Attributes:
        objective: The loss.
        params: What tasks start from.
        tasks: Two tasks or more.
        sparse: The names of tables of which tasks have rows.
        order: Of the derivatives of the loss: 2 compares a gradient of the gradient too.
        start: What parameters start from in each task; None means from the meta-parameters.
    """

    objective: TaskLoss
    params: Params
    tasks: Tasks
    sparse: Sequence[str]
    order: int
    start: OwnStart | None = None

    def difference(self) -> str | None:
        """Say why tasks must run one after the other, or None if they may be stacked.

        It leaves nothing behind: buffers, attributes of modules and random generators are set back.
        """
        with unrecorded(), torch.enable_grad():
            watched = () if self.start is None else self.start.modules
            state = WatchedModules([self.objective.model, self.objective.loss_fn, *watched])
            generators, (tasks, starts) = RandomState(), self._two()
            with generators.watched():
                expected = _attempt(lambda: self._each(tasks, starts, between=state.note_attributes))
            reason, drawn = state.changed(), generators.moved()
            if reason is None and (elsewhere := min(drawn - {"torch"}, default=None)):
                reason = (
                    f"the model draws from {elsewhere}, which stacked tasks would do once for all of them"
                )
            state.put_back()
            generators.restore()
            # The loop's own error is to be raised where it comes again.
            if reason is not None or "torch" in drawn or isinstance(expected, Exception):
                return reason
            found = _attempt(lambda: self._together(tasks, starts))
            state.put_back()
            generators.restore()
            return vmap_reason(found) if isinstance(found, Exception) else _disagreement(found, expected)

    def _two(self) -> tuple[Tasks, Params]:
        """Return two tasks, and what each starts from."""
        tasks = self.tasks.select(slice(0, 2))
        rows = find_rows(self.objective.model, self.sparse, [tasks.support_x], 1, self.objective.norms)
        return tasks._replace(rows=rows), {name: _pair(p, rows.get(name)) for name, p in self.params.items()}

    def _each(self, tasks: Tasks, starts: Params, between: Callable[[], None]) -> Derivatives:
        """Compute one task after the other; ``between`` is called after the first."""
        losses = []
        for i, task in enumerate(tasks.split(1)):
            objective = dataclasses.replace(self.objective, rows=task.rows)
            params = {name: start[i] for name, start in starts.items()} | self._own(task, stacked=False)
            losses.append(objective.single(params, task.support_x, task.support_y)[0])
            if i == 0:
                between()
        return self._derivatives(torch.stack(losses), list(starts.values()))

    def _shared(self) -> list[Tensor]:
        """Return the parameters of the model and the loss that are learned, but not adapted; no tables of rows."""
        tables = self.objective.tables
        adapted = {id(p) for p in self.params.values()}
        adapted |= {id(p) for name, p in self.objective.model.named_parameters() if name in tables}
        own = () if self.start is None else self.start.modules
        modules = [
            m for m in (self.objective.model, self.objective.loss_fn, *own) if isinstance(m, nn.Module)
        ]
        every = {id(p): p for module in modules for p in module.parameters()}
        return [p for key, p in every.items() if p.requires_grad and key not in adapted]

    def _together(self, tasks: Tasks, starts: Params) -> Derivatives:
        """Compute both at once."""
        objective = dataclasses.replace(self.objective, rows=tasks.rows)
        params = starts | self._own(tasks, stacked=True)
        losses, _ = objective.stacked(params, tasks.support_x, tasks.support_y)
        return self._derivatives(losses, list(starts.values()))

    def _own(self, tasks: Tasks, *, stacked: bool) -> Params:
        """Return what some parameters start from instead."""
        if self.start is None:
            return {}
        with normalised(self.objective.norms):
            return self.start.values(self.objective.model, self._meta_params, tasks, stacked=stacked)

    @functools.cached_property
    def _meta_params(self) -> Params:
        """The parameters as variables, but for tables, of which tasks have rows."""
        detached = {name: p.detach() for name, p in self.params.items()}
        return {name: p if name in self.sparse else p.requires_grad_() for name, p in detached.items()}

    def _derivatives(self, losses: Tensor, starts: list[Tensor]) -> Derivatives:
        variables = [*starts, *self._shared()]
        if self.start is not None:
            variables += [p for p in self._meta_params.values() if p.requires_grad]
        grads = _gradients(losses.sum(), variables, create_graph=self.order == 2)
        found = {"losses": [losses], "gradients": grads}
        if self.order == 2:
            of = grads[: len(starts)] or grads
            norm = torch.stack([losses.new_zeros(()), *(gradient.square().sum() for gradient in of)]).sum()
            found["second derivatives"] = _gradients(norm, variables) if norm.requires_grad else []
        return found


def _attempt(compute: Callable[[], Derivatives]) -> Derivatives | Exception:
    try:
        return compute()
    except Exception as error:
        return error


def vmap_reason(error: BaseException) -> str:
    """Say in a line why torch.vmap could not take a model."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if isinstance(error, NotStackableError) else f"torch.vmap cannot take the model: {line}"


def _pair(param: Tensor, rows: Tensor | None) -> Tensor:
    """Return what two tasks start from."""
    param = param.detach()
    pair = torch.stack([param, param]) if rows is None else embedding(rows, param)
    pair[1] *= _ANOTHER
    return pair.requires_grad_()


def _gradients(value: Tensor, starts: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    if not starts:
        return []
    grads = torch.autograd.grad(value, starts, create_graph=create_graph, allow_unused=True)
    return zeros_for_none(grads, starts)


def _disagreement(found: Derivatives, expected: Derivatives) -> str | None:
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
    tolerance = max(rounding(tensor) for tensor in expected)
    return not math.isfinite(scale) or distance <= tolerance * scale


def rounding(tensor: Tensor) -> float:
    """Return how far two orders of the same sums may lie apart, relatively."""
    eps = torch.finfo(tensor.dtype).eps
    if tensor.is_cuda and tensor.dtype == torch.float32:
        eps = _TF32
    if torch.is_autocast_enabled(tensor.device.type):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(tensor.device.type)).eps)
    return eps**0.4
