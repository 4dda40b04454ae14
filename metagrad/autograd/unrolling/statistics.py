"""Errors for running statistics that differentiated steps updated. torch does not differentiate the update."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from metagrad.core._torch import BatchNorm, InstanceNorm, current_graph_task
from metagrad.core.reach import ReachableObjects
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Tree, tree_leaves

_NORMS = (BatchNorm, InstanceNorm)
_guards: list[_Guard] = []


@contextlib.contextmanager
def checked_statistics(updated: set[nn.Module | Tensor] | None) -> Generator[None]:
    """Context manager for one step, which raises if a norm reads statistics that a step updated.

    Args:
        updated: The norms that an earlier step has called in training mode, and their running means, which other
            norms can share. None checks nothing.
    """

    def check(module: nn.Module, _: object, output: Tensor) -> None:
        if updated is None or not isinstance(module, _NORMS) or module.running_mean is None:
            return
        read = {module, module.running_mean}
        if module.training:
            updated.update(read)
        elif not updated.isdisjoint(read) and output.requires_grad and current_graph_task() < 0:
            raise _stale(module)

    handle = register_module_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


class StatisticsGuard:
    """Records the running statistics before a loop, and guards later reads of statistics that the loop updated.

    A later read raises if the output of the norm depends on the result of the loop. The guard ends with the next loop
    that has one of the norms, or if the result no longer exists.

    Args:
        step: The step of the loop, whose norms are found.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        norms = [m for m in ReachableObjects(step).modules if isinstance(m, _NORMS)]
        self._means = [
            (m, m.running_mean, m.running_mean.clone()) for m in norms if m.running_mean is not None
        ]
        for guard in [*_guards]:
            if not guard.norms.isdisjoint(norms):
                guard.end()  # torch.compile would trace the hook

    @property
    def reason(self) -> str | None:
        """Why the loop cannot be compiled, or None. A compiled step does not show where it reads statistics."""
        updating = (type(m).__name__ for m, _, _ in self._means if m.training)
        return next((f"{name} in training mode updates running statistics" for name in updating), None)

    def guard(self, result: Tree, *, compiled: bool) -> None:
        """Make later calls raise if they read updated statistics and depend on a result of the loop.

        Raises:
            RuntimeError: A compiled step updated the statistics, and can have read them.
        """
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        updated = [m for m, mean, before in self._means if results and not torch.equal(mean, before)]
        if updated and compiled:
            raise RuntimeError(
                f"unroll(step, ..., compile): the step calls {type(updated[0]).__name__} in training mode. Call "
                "train() before the loop, which then runs without being compiled, or pass compile=False."
            )
        if updated:
            _guards.append(_Guard(updated, results))


class _Guard:
    """A hook of all modules. It keeps neither the modules nor the results alive."""

    def __init__(self, norms: Sequence[nn.Module], results: list[Tensor]) -> None:
        self.norms = weakref.WeakSet(norms)
        self.means = [weakref.ref(norm.running_mean) for norm in norms]
        self.results = [weakref.ref(t) for t in results]
        self.handle = register_module_forward_hook(self)

    def __call__(self, module: nn.Module, _: object, output: Any) -> None:
        nodes = {result.grad_fn for ref in self.results if (result := ref()) is not None} - {None}
        if not nodes:
            self.end()
        elif self._reads(module) and not module.training and not nodes.isdisjoint(graph_nodes([output])):
            raise _stale(module)

    def end(self) -> None:
        self.handle.remove()
        if self in _guards:
            _guards.remove(self)

    def _reads(self, module: nn.Module) -> bool:
        mean = getattr(module, "running_mean", None)
        return module in self.norms or any(mean is ref() for ref in self.means if mean is not None)


def _stale(module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"unroll(step, ...): {type(module).__name__} in evaluation mode reads running statistics that a step "
        "updated, and torch does not differentiate the update. Use batch statistics (training mode), pass "
        "track_running_stats=False, or compute a metric under torch.no_grad()."
    )
