r"""Reverse mode, and forward over reverse, block by block: with the graph of one block at a time.

The backward pass is :math:`g_i = J_i^\top g_{i+1}`. Its derivative in a direction :math:`\dot z` of the operands is a
pass of the same form, in which every value has a tangent, its rate of change (forward over reverse; Pearlmutter 1994,
section 3):

.. math::
    \dot x_{i+1} = J_i \dot z_i, \qquad
    \dot g_i = \nabla_{z_i} \bigl(\langle \dot g_{i+1}, f_i(z_i) \rangle + \langle g_{i+1}, J_i \dot z_i \rangle\bigr)

Both are products with the block's own graph: a Jacobian times a vector is the derivative of the vector-Jacobian
product with respect to its cotangent (Townsend 2017). For a transformer block this is quicker and smaller than the
jvp of a vjp, and it differentiates what the tape says, where forward mode goes through ``torch.no_grad`` and past
hooks on gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.checks.lint import findings
from metagrad.autograd.derivatives.graph_vjp import graph_jvp, graph_vjp
from metagrad.autograd.recompute.checkpoint import vjp
from metagrad.autograd.recompute.replay import Call
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import fresh_leaf, plus

Maybe: TypeAlias = "list[Tensor | None]"


class Stage(NamedTuple):
    """A recorded block, or the loss.

    The tensors of its call are some operands, the outputs of the stage before, and more operands.

    Attributes:
        name: How errors name it.
        call: The block as a function of its tensors.
        before: Which operands come first.
        width: How many outputs the stage before has.
        after: Which operands come last: its free tensors.
        outgoing: Which of its outputs require grad.
    """

    name: str
    call: Call
    before: list[int]
    width: int
    after: list[int]
    outgoing: list[bool]

    def gather(self, operands: Sequence[Any], incoming: Sequence[Any]) -> list[Any]:
        """Return values of the operands and of the incoming tensors in the order of the tensors of the call."""
        return [*(operands[i] for i in self.before), *incoming, *(operands[i] for i in self.after)]

    def divide(self, values: Sequence[Tensor | None], totals: Maybe) -> Maybe:
        """Add the values of operands to their totals; return the values of the incoming tensors."""
        end = len(self.before) + self.width
        ends = [*values[: len(self.before)], *values[end:]]
        for index, value in zip([*self.before, *self.after], ends, strict=True):
            totals[index] = plus(totals[index], value)
        return list(values[len(self.before) : end])


def compose(stages: Iterable[Stage], operands: Sequence[Tensor]) -> Tensor:
    """Run all stages on one tape; return the loss."""
    values: Sequence[Tensor] = []
    for stage in stages:
        # A tensor that a block returns twice is two inputs of the next, as when that was recorded.
        values = [value.view_as(value) for value in stage.call(stage.gather(operands, values))]
    (loss,) = values
    return loss


def pull_back(
    stages: Sequence[Stage], operands: Sequence[Tensor], kept: list[list[Tensor]], cotangent: Tensor
) -> Maybe:
    """Return the gradients of the operands, block by block.

    Args:
        stages: The recorded blocks, and the loss.
        operands: Leaves; ``requires_grad`` says which gradients are wanted.
        kept: The inputs of each stage, leaves as well; emptied by this function.
        cotangent: That of the loss.
    """
    totals: Maybe = [None] * len(operands)
    current: Maybe = [cotangent]
    for stage in reversed(stages):
        tensors = stage.gather(operands, kept.pop())
        gradients = vjp(stage.call, tensors, [t.requires_grad for t in tensors], current)
        current = stage.divide(gradients, totals)
    return totals


class Rates(NamedTuple):
    """Gradients of the operands, and their rates of change; None where nothing flows."""

    gradients: Maybe
    rates: Maybe


def pull_back_rates(
    stages: Sequence[Stage],
    operands: Sequence[Tensor],
    directions: Maybe,
    cotangent: Tensor,
    rate: Tensor | None,
    *,
    with_gradients: bool,
) -> Rates:
    r"""Return :math:`\tfrac{d}{d\varepsilon} (g + \varepsilon \dot g)^\top J(z + \varepsilon \dot z)`.

    Args:
        stages: The recorded blocks, and the loss.
        operands: Leaves; ``requires_grad`` says which derivatives are wanted.
        directions: The rates of change of the operands; None where they do not change.
        cotangent: That of the loss.
        rate: Its rate of change.
        with_gradients: Return the gradients of the operands as well.
    """
    kept = _push_forward(stages, operands, directions)
    result = Rates([None] * len(operands), [None] * len(operands))
    current: Maybe = [cotangent]
    drift: Maybe = [rate]
    for stage in reversed(stages):
        values, rates = kept.pop()
        tensors, moving = stage.gather(operands, values), stage.gather(directions, rates)
        if with_gradients or any(direction is not None for direction in moving):
            first, second = _pull_both(stage, tensors, moving, current, drift)
        else:
            # No earlier stage changes either, so the cotangents themselves are not needed.
            first = [None] * len(tensors)
            second = vjp(stage.call, tensors, [t.requires_grad for t in tensors], drift)
        forgotten: Maybe = [None] * len(operands)
        gradients = result.gradients if with_gradients else forgotten
        current, drift = stage.divide(first, gradients), stage.divide(second, result.rates)
    return result


def _push_forward(
    stages: Sequence[Stage], operands: Sequence[Tensor], directions: Maybe
) -> list[tuple[list[Tensor], Maybe]]:
    """Return the inputs of each stage, and their rates of change."""
    kept: list[tuple[list[Tensor], Maybe]] = [([], [])]
    for stage in stages[:-1]:
        values, rates = kept[-1]
        outputs, rates = _push(stage, stage.gather(operands, values), stage.gather(directions, rates))
        leaves = [o.detach().requires_grad_(g) for o, g in zip(outputs, stage.outgoing, strict=True)]
        kept.append((leaves, rates))
    return kept


def _push(stage: Stage, tensors: list[Tensor], directions: Maybe) -> tuple[Sequence[Tensor], Maybe]:
    """Run a block; return its outputs and their rates of change."""
    moving = [i for i, direction in enumerate(directions) if direction is not None]
    if not moving:
        with torch.no_grad():
            outputs = stage.call(tensors)
        return outputs, [None] * len(outputs)
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_(d is not None) for t, d in zip(tensors, directions, strict=True)]
        outputs = stage.call(inputs)
        refuse_defects(stage.name, outputs, order=2)
        rates = graph_jvp(outputs, [inputs[i] for i in moving], [directions[i] for i in moving])
    return outputs, rates


def _pull_both(
    stage: Stage, tensors: list[Tensor], directions: Maybe, cotangents: Maybe, rates: Maybe
) -> tuple[Maybe, Maybe]:
    """Compute the vector-Jacobian product of a block, and its rate of change."""
    wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    first: Maybe = [None] * len(tensors)
    second: Maybe = [None] * len(tensors)
    with torch.enable_grad():
        inputs = [fresh_leaf(tensor) for tensor in tensors]
        outputs = stage.call(inputs)
        refuse_defects(stage.name, outputs, order=2)
        leaves = [inputs[i] for i in wanted]
        pulled = graph_vjp(outputs, leaves, cotangents, create_graph=True)
        turned = graph_vjp([*pulled, *outputs], leaves, [*(directions[i] for i in wanted), *rates])
    for index, gradient, rate in zip(wanted, pulled, turned, strict=True):
        first[index] = None if gradient is None else gradient.detach()
        second[index] = rate
    return first, second


def refuse_defects(name: str, outputs: Sequence[Tensor], *, order: int) -> None:
    """Raise if a node that made the outputs will not survive the derivative."""
    for finding in findings(graph_nodes(outputs), order, ("cut", "error", "wrong")):
        raise ValueError(f"{name}: {finding}")
