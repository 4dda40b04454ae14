"""Decide how many tasks run in one vectorized pass over stacked parameters, or whether they run in a Python loop.

The decision has three parts. First, :func:`loop_reason` and :func:`prefers_loop` inspect the modules. Second, two
calls in :mod:`metagrad.meta.execution.examination` must agree and change nothing. Third,
the tasks fall back to a Python loop if torch.vmap raises. The table ``RULES`` of :mod:`metagrad.meta.objective.vmap`
lists the operations that torch.vmap computes incorrectly without an error.
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
from metagrad.meta.execution.examination import Findings
from metagrad.meta.objective.vmap import NotStackableError

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EVERYWHERE: Any = torch.nn.modules.module
_MOST_STRUCTURES = 64
_RUNNING_STATISTICS = (_torch.BatchNorm, _torch.InstanceNorm)


class Vectorization:
    """Decides how many tasks run in one vectorized pass, once for each structure of the model.

    Attributes:
        task_chunk: Maximum number of tasks in one pass. None means all tasks.
        name: Name of the algorithm in warnings and errors.
        ran: The structures whose tasks have run vectorized.
    """

    def __init__(self, task_chunk: int | None, name: str = "MAML") -> None:
        self.task_chunk = task_chunk
        self.name = name
        self.ran: set[Hashable] = set()
        self._found: dict[Hashable, Findings] = {}
        self._warned: set[str] = set()

    def __getstate__(self) -> dict[str, object]:
        """Exclude the entries that depend on the identity of modules."""
        return {**self.__dict__, "ran": set(), "_found": {}}

    def findings(self, structure: Hashable, examine: Callable[[], Findings | None] | None = None) -> Findings:
        """Return the examination of the first task of a structure.

        Args:
            structure: A key that changes if the model must be examined again, see :func:`structure_of`.
            examine: Examines a task, once for each structure. If None, only results that are already known are
                returned.
        """
        found = self._found.get(structure)
        if found is None and examine is not None and (found := examine()) is not None:
            if len(self._found) == _MOST_STRUCTURES:
                self._found.clear()
            self._found[structure] = found
        return found or Findings()

    def chunk_size(self, count: int, loop: str | None) -> int:
        """Return the number of tasks in one vectorized pass. 1 means a Python loop without vmap.

        Args:
            count: The number of tasks.
            loop: Why tasks cannot be vectorized, None if they can, and "" if a loop is faster.
        """
        if count == 1 or self.task_chunk == 1:
            return 1
        self._warn(loop)
        return min(self.task_chunk or count, count) if loop is None else 1

    def give_up(self, structure: Hashable, error: Exception) -> None:
        """Warn that torch.vmap raised. Later batches run in a loop if it raised on the first batch."""
        if structure not in self.ran:
            self._found[structure] = self.findings(structure)._replace(loop="")
        self._warn(vmap_reason(error))

    def _warn(self, reason: str | None) -> None:
        if reason:
            self.warn_once(
                f"{self.name}: the tasks of a batch run one by one, because {reason}. "
                "Pass task_chunk=1 to choose this without a warning."
            )

    def warn_once(self, message: str) -> None:
        """Issue a warning if it is new."""
        if message not in self._warned:
            self._warned.add(message)
            warn(message)


def may_be_of_vmap(error: Exception) -> bool:
    """Return whether an error may be from torch.vmap. If it is from the model, the loop raises it again."""
    return not isinstance(error, (torch.OutOfMemoryError, BudgetError))


def vmap_reason(error: BaseException) -> str:
    """Return in one line why torch.vmap does not support a model."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if isinstance(error, NotStackableError) else f"torch.vmap cannot take the model: {line}"


def structure_of(model: nn.Module) -> Hashable:
    """Return a key that changes if modules, hooks or flags of a model change."""
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
    """Return whether a Python loop over tasks is faster than a vectorized pass.

    If its weights are adapted, a vmapped convolution is a grouped convolution. On a CPU that takes twice as long as a
    loop of convolutions (``python -m experiments.benchmarks.maml`` prints both). A convolution with shared weights
    is one call for the examples of all tasks.

    Args:
        model: The model.
        device_type: The device type of the model.
        params: The adapted parameters.
    """
    adapted = {id(p) for p in params.values()}
    own = (module for module in model.modules() if any(id(p) in adapted for p in module.parameters()))
    return device_type == "cpu" and any(isinstance(module, _CONVOLUTIONS) for module in own)


def loop_reason(model: nn.Module, has_norm_policy: bool = False) -> str | None:
    """Return why torch.vmap does not support a model, if the modules show it, otherwise None."""
    if _EVERYWHERE._global_backward_hooks or _EVERYWHERE._global_backward_pre_hooks:
        return "torch.vmap passes the backward hooks of all modules by"
    reasons = (_own_loop_reason(name, module, has_norm_policy) for name, module in named_modules(model))
    return next(filter(None, reasons), None)


def _own_loop_reason(name: str, module: nn.Module, has_norm_policy: bool) -> str | None:
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
