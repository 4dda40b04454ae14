"""How the tasks of a meta-batch are computed: together, vmapped over stacked parameters, or one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core.budget import BudgetError
from metagrad.core.capture import RandomState
from metagrad.core.tree import tree_leaves, tree_map
from metagrad.meta.examination import difference, vmap_reason
from metagrad.meta.module_state import buffer_versions
from metagrad.meta.structured import Nested, num_tasks
from metagrad.optim.rules import Params

if TYPE_CHECKING:
    from metagrad.meta.objective import Labels, Objective

T = TypeVar("T")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EVERYWHERE: Any = torch.nn.modules.module
_MOST_STRUCTURES = 64
_RUNNING_STATISTICS = (_torch.BatchNorm, _torch.InstanceNorm)


class Tasks(NamedTuple):
    """A meta-batch, tensors ``[tasks, examples, ...]`` or nested values of such; or one task, without that axis."""

    support_x: Nested
    support_y: Nested
    query_x: Nested | None
    query_y: Nested | None
    rows: Params
    """Which rows of a table the tasks look up, ``[tasks, R]``, by the name of the table."""

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return num_tasks(self.support_x)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return tree_leaves(self.support_x)[0].device

    @property
    def inputs(self) -> list[Nested]:
        """Those of the support examples, and of the query examples if there are any."""
        return [x for x in (self.support_x, self.query_x) if x is not None]

    def each(self) -> Iterator[Tasks]:
        """Yield one task after the other."""
        for i in range(self.count):
            yield self.select(i)

    def split(self, size: int) -> Iterator[Tasks]:
        """Yield ``size`` tasks after the other, at the end those that are left."""
        if size >= self.count:
            yield self
            return
        for i in range(0, self.count, size):
            yield self.select(slice(i, i + size))

    def select(self, index: int | slice | Tensor) -> Tasks:
        """Return some of the tasks, or with an int one of them, without the first axis."""
        return tree_map(lambda tensor: None if tensor is None else tensor[index], self)


class Batching:
    """Decides how many tasks run together, and falls back to one by one where they cannot.

    Args:
        task_chunk: What the user asked for; None leaves the choice to what was measured.
    """

    def __init__(self, task_chunk: int | None) -> None:
        self.task_chunk = task_chunk
        self._vmap_ran = False
        self._must_loop = False
        self._stackable: dict[Hashable, bool] = {}
        self._reasons: set[str] = set()

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is known by the identity of modules."""
        return {**self.__dict__, "_stackable": {}}

    def chunk_size(
        self,
        objective: Objective,
        params: Params,
        tasks: Tasks,
        labels: Labels | None,
        sparse: Sequence[str],
        order: int,
    ) -> int:
        """Return how many tasks to compute together; 1 means one by one, without vmap.

        A model is examined once, and again when its structure has changed: its modules, hooks and flags.

        Args:
            objective: The model and its loss.
            params: What tasks start from.
            tasks: The tasks.
            labels: The bounds of their labels.
            sparse: The names of tables of which tasks have rows.
            order: Of the derivatives of the loss.
        """
        if tasks.count == 1 or self.task_chunk == 1 or self._must_loop:
            return 1
        structure = _structure(objective.model)
        if structure not in self._stackable:
            if len(self._stackable) == _MOST_STRUCTURES:
                self._stackable.clear()
            self._stackable[structure] = self._examine(objective, params, tasks, labels, sparse, order)
        return min(self.task_chunk or tasks.count, tasks.count) if self._stackable[structure] else 1

    def _examine(self, objective: Objective, params: Params, *about: Any) -> bool:
        model = objective.model
        if self.task_chunk is None and prefers_loop(model, next(iter(params.values())).device.type):
            return False
        reason = loop_reason(model)
        if reason is None and not _torch.functorch_is_active():
            reason = difference(objective, params, *about)
        if reason is not None:
            self._warn(reason)
        return reason is None

    def run(self, model: nn.Module, compute: Callable[[int], T], chunk: int) -> T:
        """Call ``compute(chunk)``; if vmap turns out not to take the model, call ``compute(1)`` instead."""
        if chunk == 1:
            return compute(chunk)
        versions = buffer_versions(model)
        result = compute(chunk) if self._vmap_ran else self._attempt(compute, chunk)
        if not self._must_loop and buffer_versions(model) != versions:
            raise RuntimeError(
                "MAML: the model writes into a buffer, which it did not do when it was examined on its first batch. "
                "Stacked tasks did so once for all of them; pass task_chunk=1, and they run one after the other."
            )
        return result

    def _attempt(self, compute: Callable[[int], T], chunk: int) -> T:
        random_state = RandomState()
        try:
            result = compute(chunk)
        except (torch.OutOfMemoryError, BudgetError):
            raise
        except Exception as error:
            random_state.restore()
            # An error of the model's own comes out of the loop again, and leaves from there.
            result = compute(1)
            self._must_loop = True
            self._warn(vmap_reason(error))
            return result
        self._vmap_ran = True
        return result

    def _warn(self, reason: str) -> None:
        if reason in self._reasons:
            return
        self._reasons.add(reason)
        warnings.warn(
            f"MAML: the tasks of a batch run one by one, because {reason}. "
            "Pass task_chunk=1 to choose this without a warning.",
            stacklevel=2,
        )


def _structure(model: nn.Module) -> Hashable:
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


def prefers_loop(model: nn.Module, device_type: str) -> bool:
    """Say whether tasks one by one are faster than all at once.

    With weights of its own for each task a vmapped convolution becomes a grouped one, which on CPU costs twice
    as much as one convolution after the other (``python -m experiments.bench`` prints both).
    """
    return device_type == "cpu" and any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def loop_reason(model: nn.Module) -> str | None:
    """Say why torch.vmap cannot take a model, where that shows without trying."""
    if _EVERYWHERE._global_backward_hooks or _EVERYWHERE._global_backward_pre_hooks:
        return "torch.vmap passes the backward hooks of all modules by"
    for name, module in model.named_modules():
        kind = f"{type(module).__name__} ({name or 'the model itself'})"
        if isinstance(module, nn.RNNBase):
            return f"torch.vmap has no rule for {kind}"
        if module._backward_hooks or module._backward_pre_hooks:
            return f"torch.vmap passes the backward hooks of {kind} by"
        if isinstance(module, _RUNNING_STATISTICS) and module.training and module.track_running_stats:
            return (
                f"{kind} updates running statistics, which all tasks share "
                "(with track_running_stats=False it uses those of each batch)"
            )
    return None
