"""What is known of operations that ``torch.vmap`` computes otherwise than a loop does, without a word.

One row for each, found by running torch's own operator tests (``OpInfo``) through ``torch.vmap`` and through a loop
in float64: values, gradients and gradients of a non-linear function of these (torch 2.13).
``tests/meta/test_vmap_rules.py`` does so again, and shows the defect of every row, so that it fails once torch has
mended it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Call(NamedTuple):
    """The arguments of a call of a torch function."""

    args: tuple
    kwargs: dict[str, Any]

    def argument(self, position: int, name: str, default: object = None) -> Any:
        """Return an argument by position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


class VmapRule(NamedTuple):
    """An operation that torch.vmap computes wrongly, or a question that it answers wrongly."""

    functions: tuple[Callable[..., Any], ...]
    reason: str  # follows "because"
    applies: Callable[[Call], bool]


def _always(call: Call) -> bool:
    return True


RULES: tuple[VmapRule, ...] = (
    VmapRule(
        (torch.select_scatter, Tensor.select_scatter),
        "torch.vmap loses the gradient of torch.select_scatter with respect to what is written",
        _always,
    ),
    VmapRule(
        (torch.roll, Tensor.roll),
        "torch.vmap rolls a scalar of each task across the tasks",
        lambda call: call.argument(0, "input").ndim == 0,
    ),
    VmapRule(
        (torch.index_fill, Tensor.index_fill, Tensor.index_fill_),
        "torch.vmap fills by torch.index_fill with one task's value for all, where the value alone differs",
        lambda call: isinstance(call.argument(3, "value"), Tensor),
    ),
    VmapRule(
        tuple(filter(None, [getattr(F, "linear_cross_entropy", None)])),
        "torch.vmap loses gradients of F.linear_cross_entropy(..., options)",
        lambda call: call.kwargs.get("options") is not None,
    ),
    # Of the graph, which tensors that vmap wraps do not know.
    VmapRule(
        (Tensor.grad_fn.__get__, Tensor.is_leaf.__get__),  # type: ignore[reportAttributeAccessIssue]
        "the model asks for the graph of a tensor (grad_fn, is_leaf), which torch.vmap hides",
        _always,
    ),
)
