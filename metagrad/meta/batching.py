"""How the tasks of a meta-batch are computed: together, vmapped over stacked parameters, or one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from metagrad._tree import tree_leaves, tree_map
from metagrad.autograd.ambient import RandomState
from metagrad.autograd.budget import BudgetError
from metagrad.meta.structured import Nested, num_tasks
from metagrad.optim.rules import Params

T = TypeVar("T")

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RUNNING_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


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

    def chunk_size(
        self, model: nn.Module, num_tasks: int, device_type: str, sparse: Collection[str] = ()
    ) -> int:
        """Return how many tasks to compute together; 1 means one by one, without vmap."""
        if num_tasks == 1 or self.task_chunk == 1 or self._must_loop:
            return 1
        if self.task_chunk is None and prefers_loop(model, device_type):
            return 1
        reason = loop_reason(model, sparse)
        if reason is not None:
            self._fall_back(reason)
            return 1
        return min(self.task_chunk or num_tasks, num_tasks)

    def run(self, compute: Callable[[int], T], chunk: int) -> T:
        """Call ``compute(chunk)``; if vmap turns out not to take the model, call ``compute(1)`` instead."""
        if chunk == 1 or self._vmap_ran:
            return compute(chunk)
        random_state = RandomState()
        try:
            result = compute(chunk)
        except (torch.OutOfMemoryError, BudgetError):
            raise
        except Exception as error:
            random_state.restore()
            # An error of the model's own comes out of the loop again, and leaves from there.
            result = compute(1)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._fall_back(f"torch.vmap cannot take the model: {lines[0]}")
            return result
        self._vmap_ran = True
        return result

    def _fall_back(self, reason: str) -> None:
        self._must_loop = True
        warnings.warn(
            f"MAML: the tasks of a batch run one by one, because {reason}. "
            "Pass task_chunk=1 to choose this without a warning.",
            stacklevel=2,
        )


def prefers_loop(model: nn.Module, device_type: str) -> bool:
    """Say whether tasks one by one are faster than all at once.

    With weights of its own for each task a vmapped convolution becomes a grouped one, which on CPU costs twice
    as much as one convolution after the other (``python -m experiments.bench`` prints both).
    """
    return device_type == "cpu" and any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def _batched(model: nn.Module, sparse: Collection[str]) -> Iterator[Tensor]:
    return (p for name, p in model.named_parameters() if p.requires_grad and name not in sparse)


def loop_reason(model: nn.Module, sparse: Collection[str] = ()) -> str | None:
    """Say why torch.vmap cannot take a model, where that shows without trying.

    Args:
        model: The model.
        sparse: The names of tables of which tasks have rows, and whose lookups are not torch's own.
    """
    for name, module in model.named_modules():
        kind = f"{type(module).__name__} ({name or 'the model itself'})"
        if isinstance(module, nn.RNNBase):
            return f"torch.vmap has no rule for {kind}"
        if (
            isinstance(module, nn.Embedding)
            and module.padding_idx is not None
            and any(p is module.weight for p in _batched(model, sparse))
        ):
            return f"torch.vmap forgets the padding_idx of {kind} (torch 2.13), unless MAML(..., sparse) names it"
        if isinstance(module, _RUNNING_STATISTICS) and module.training and module.track_running_stats:
            return (
                f"{kind} updates running statistics, which all tasks share "
                "(with track_running_stats=False it uses those of each batch)"
            )
    return None
