"""What an inner loop compiles: its rule, whose numbers are tensors, and the query loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metagrad.autograd.unrolling.compiled import Compiler
from metagrad.core.structured import Nested, Structured
from metagrad.core.tree import tree_map
from metagrad.meta.objective.task_loss import Loss
from metagrad.optim.rules import Params, Rule


def with_tensors(rule: Rule, like: Tensor) -> Rule:
    """Return a rule with every number as a 0-d tensor, so that another number needs no recompilation.

    The number 0 stays a number: a rule leaves out the momentum or the decay that is not used.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

    def made(leaf: object) -> object:
        if not isinstance(leaf, (int, float)) or isinstance(leaf, bool):
            return leaf
        return torch.full((), leaf, dtype=dtype, device=like.device) if leaf else 0

    return tree_map(made, rule)


def query_loss(compiler: Compiler, loss: Loss, params: Params, x: Nested, y: Nested) -> tuple[Tensor, Nested]:
    """Return losses and predictions of adapted parameters."""
    return compiler.of(_query_loss)(loss, params, x, y)


def _query_loss(loss: Loss, params: Params, x: Nested, y: Nested) -> Any:
    results = loss(params, x, y)
    refuse_structured(results)
    return results


def refuse_structured(results: Sequence[Nested | None]) -> None:
    """Raise if a model returns anything but a tensor, which compiled functions do not return."""
    for result in results:
        if isinstance(result, Structured):
            raise TypeError("the model returns several tensors (wrap one that returns the logits)")
