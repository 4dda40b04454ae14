"""How many tasks run together: all at once, vmapped over stacked parameters, or one after the other.

Whether they may run together is decided in this order: :func:`loop_reason` and :func:`prefers_loop` look at the
modules. A model that is called twice must not change from call to call, since that would happen once for all stacked
tasks. Then torch.vmap is tried, and if it raises, the tasks run one after the other. What torch.vmap computes
differently without an error is in the table ``RULES`` of :mod:`metagrad.meta.objective.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from metagrad.core import _torch
from metagrad.core._torch import named_modules
from metagrad.core.budget import BudgetError
from metagrad.core.checks import warn
from metagrad.core.tree import Params
from metagrad.meta.objective.vmap import NotStackableError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EVERYWHERE: Any = torch.nn.modules.module
_MOST_STRUCTURES = 64
_RUNNING_STATISTICS = (_torch.BatchNorm, _torch.InstanceNorm)


class Stacking:
    """Decides how many tasks run together, and remembers it for each structure of the model.

    Args:
        task_chunk: What the user asked for; None means all.
        name: Of the algorithm, in warnings and errors.
    """

    def __init__(self, task_chunk: int | None, name: str = "MAML") -> None:
        self.task_chunk = task_chunk
        self.name = name
        self._stackable: dict[Hashable, bool] = {}
        self._ran: set[Hashable] = set()
        self._reruns: dict[Hashable, str | None] = {}
        self._warned: set[str] = set()
        self.functions: dict[Hashable, list[str]] = {}

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is known by the identity of modules."""
        return {**self.__dict__, "_stackable": {}, "_ran": set(), "_reruns": {}, "functions": {}}

    def chunk_size(self, count: int, structure: Hashable, examine: Callable[[], str | None]) -> int:
        """Return how many tasks to compute together; 1 means one by one, without vmap.

        Args:
            count: The number of tasks.
            structure: What changes when the model must be examined again, see :func:`structure_of`.
            examine: Returns why tasks must run one by one, None if they may be stacked, and "" if a loop is faster.
        """
        if count == 1 or self.task_chunk == 1:
            return 1
        if structure not in self._stackable:
            if len(self._stackable) == _MOST_STRUCTURES:
                self._stackable.clear()
            reason = examine()
            self._stackable[structure] = reason is None
            self._warn(reason)
        return min(self.task_chunk or count, count) if self._stackable[structure] else 1

    def rerun_module(self, structure: Hashable, find: Callable[[], str | None] | None = None) -> str | None:
        """Return the module that runs again in the backward pass. None if there is none, or none is known.

        Args:
            structure: What changes when the model must be examined again.
            find: Looks for such a module, once for each structure.
        """
        if find is not None and structure not in self._reruns:
            if len(self._reruns) == _MOST_STRUCTURES:
                self._reruns.clear()
            self._reruns[structure] = find()
        return self._reruns.get(structure)

    def is_tried(self, structure: Hashable) -> bool:
        """Return whether stacked tasks have run."""
        return structure in self._ran

    def note(self, structure: Hashable) -> None:
        """Note that stacked tasks have run."""
        self._ran.add(structure)

    def give_up(self, structure: Hashable, error: Exception) -> None:
        """Run tasks one by one from here on, since torch.vmap raised an error on the first batch."""
        self._stackable[structure] = structure in self._ran
        self._warn(vmap_reason(error))

    def _warn(self, reason: str | None) -> None:
        if reason:
            self.warn_once(
                f"{self.name}: the tasks of a batch run one by one, because {reason}. "
                "Pass task_chunk=1 to choose this without a warning."
            )

    def warn_once(self, message: str) -> None:
        """Issue a warning, unless it was issued before."""
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def may_be_of_vmap(error: Exception) -> bool:
    """Return whether an error may be torch.vmap's. If it is the model's own, the loop raises it again."""
    return not isinstance(error, (torch.OutOfMemoryError, BudgetError))


def vmap_reason(error: BaseException) -> str:
    """Return in a line why torch.vmap could not take a model."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if isinstance(error, NotStackableError) else f"torch.vmap cannot take the model: {line}"


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
    """Return whether tasks one by one are faster than all at once.

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


def loop_reason(model: nn.Module, has_norm_policy: bool = False) -> str | None:
    """Return why torch.vmap cannot take a model, where that shows without trying."""
    if _EVERYWHERE._global_backward_hooks or _EVERYWHERE._global_backward_pre_hooks:
        return "torch.vmap passes the backward hooks of all modules by"
    reasons = (_own_loop_reason(name, module, has_norm_policy) for name, module in named_modules(model))
    return next(filter(None, reasons), None)


def _own_loop_reason(name: str, module: nn.Module, has_norm_policy: bool) -> str | None:
    """Return the reason for a module without its children."""
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
    """Return whether a call of a module updates running statistics."""
    return isinstance(module, _RUNNING_STATISTICS) and module.training and module.track_running_stats
