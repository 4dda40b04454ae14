"""Examine one task of the first batch, once for each structure of the model.

The task is computed twice and differentiated once. The parameters that are read, the autograd graph, and the changes
of modules and random generators decide how later batches run. All changes are undone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from metagrad.autograd.checks.lint import custom_functions
from metagrad.core._torch import named_modules
from metagrad.core.capture import RandomState
from metagrad.core.modules import ModuleSnapshot
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import Read, noted_reads, refuse_hidden
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Params
from metagrad.meta.objective.vmap import is_plain

_PLAIN = ("torch.nn.modules.", "metagrad.models.")  # their modules run only in the forward pass
_SAME = 1e-3  # tolerance between two computations of a loss


class Findings(NamedTuple):
    """The results of an examination.

    Attributes:
        loop: Why tasks cannot be vectorized, None if they can, and "" if a loop is faster.
        rerun: The module that runs again in the backward pass, as checkpointed layers do, or None.
        functions: The custom autograd Functions in the graph of the loss.
    """

    loop: str | None = None
    rerun: str | None = None
    functions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examination:
    """The examination of a task.

    Attributes:
        name: Name of the algorithm in errors.
        model: The model.
        modules: The model, and other modules that a loss calls.
        params: The initial parameters.
        probe: ``probe(params)`` returns the loss of the task.
    """

    name: str
    model: nn.Module
    modules: Sequence[nn.Module]
    params: Params
    probe: Callable[[Params], Tensor]

    def findings(self, loop: str | None) -> Findings | None:
        """Return the results of the examination.

        None if the task raises, since it raises again in the real run.

        Args:
            loop: Why tasks cannot be vectorized, if that is known. Otherwise a second call shows it.

        Raises:
            ValueError: A gradient would be wrong.
        """
        paths = {module: path for root in self.modules for path, module in named_modules(root)}
        state = ModuleSnapshot(paths, {}, math.inf)
        random = RandomState(ReachableObjects(self.modules).generators)  # type: ignore[reportArgumentType]
        params = {name: p.detach().requires_grad_() for name, p in self.params.items()}
        forward: list[Read] = []
        backward: list[Read] = []
        nodes: list[Node] = []
        without: set[int] = set()
        try:
            with torch.enable_grad():
                with self._noted(forward):
                    loss = self.probe(params)
                nodes += graph_nodes([loss])
                with self._noted(backward):
                    without |= self._differentiate(loss, params)
                if loop is None and not any(read.is_original for read in backward):
                    first = ModuleSnapshot(paths)  # the first call may initialize attributes of modules
                    drawn = random.moved() - {"torch"}
                    random.restore()
                    again = self.probe(params)
                    loop = _difference(loss, again, drawn, state.changed(first), paths)
        except Exception:
            # A backward pass with unexpected parameters may raise.
            if not any(read.is_reentrant for read in forward) and not backward:
                return None
        finally:
            state.put_back(values=True)
            random.restore()
        self._refuse(forward, nodes)
        refuse_hidden(f"{self.name}(batch)", forward, without)
        rerun = next((read.module for read in backward if read.is_original), None)
        return Findings(loop, rerun, tuple(custom_functions(nodes)) if params else ())

    def _noted(self, reads: list[Read]) -> contextlib.AbstractContextManager[None]:
        """Record reads of parameters, if a module may run outside of the forward pass."""
        modules = self.model.modules()
        if all(is_plain(m) and type(m).__module__.startswith(_PLAIN) for m in modules):
            return contextlib.nullcontext()
        return noted_reads(self.model, reads)

    def _differentiate(self, loss: Tensor, params: Params) -> set[int]:
        """Run a backward pass, and return the ids of parameters that have no gradient."""
        inputs = [p for p in (*params.values(), *self.model.parameters()) if p.requires_grad]
        if not loss.requires_grad:
            return set()
        grads = torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)
        return {id(p) for p, g in zip(params.values(), grads, strict=False) if g is None}

    def _refuse(self, forward: Sequence[Read], nodes: Sequence[Node]) -> None:
        """Raise ``ValueError`` if inner gradients would be wrong."""
        for read in forward:
            if read.is_reentrant:
                raise ValueError(
                    f"{self.name}(batch): torch.utils.checkpoint(..., use_reentrant=True) around {read.module} "
                    "gives no gradient here. Pass use_reentrant=False, or call metagrad.checkpoint there."
                )
        variables = {id(node.variable) for node in nodes if hasattr(node, "variable")}  # type: ignore[attr-defined]
        for name, p in self.params.items():
            if id(p) in variables:
                raise ValueError(
                    f"{self.name}(model, loss_fn): the loss of a task reads the parameter {name!r} of the model "
                    "directly, so inner steps would ignore that term. Compute the loss from predictions and "
                    "targets. For a penalty on adapted parameters, use weight_decay of the inner optimizer, or "
                    "let the model return the penalty."
                )


def _difference(
    first: Tensor,
    second: Tensor,
    drawn: set[str],
    changed: tuple[nn.Module, str] | None,
    paths: Mapping[nn.Module, str],
) -> str | None:
    """Return a description of how two calls differ, or of what a call changed, or None."""
    if drawn:
        return f"the model draws from {min(drawn)}, which stacked tasks would do once for all of them"
    if changed is not None:
        module, how = changed
        return (
            f"{type(module).__name__} ({paths[module] or 'the module itself'}) {how}, which all tasks share"
        )
    is_same = torch.allclose(first, second, rtol=_SAME, atol=_SAME, equal_nan=True)
    return None if is_same else "its loss is another one when it is called again"
