"""Inner loops: the adaptation of one task, or of a batch of tasks at once, as a differentiable unroll."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad import memory as memory_tracking
from metagrad.autograd.unroll import Memory, unroll
from metagrad.meta.objective import Labels
from metagrad.optim.rules import Params, Rule

Loss = Callable[[Params, Tensor, Tensor, Labels | None], tuple[Tensor, Tensor]]
"""Parameters, inputs, targets, label bounds to losses (one, or one for each task) and predictions."""


class Adaptation(NamedTuple):
    """What an inner loop leaves.

    Attributes:
        params: The adapted parameters.
        losses: The loss before each step, ``[steps]`` or ``[steps, tasks]``.
    """

    params: Params
    losses: Tensor


@dataclass(frozen=True)
class InnerLoop:
    """How a task is adapted to.

    Attributes:
        rule: What makes a step of a gradient.
        order: 2 differentiates through the gradient, 1 takes it as a constant.
        memory: What :func:`metagrad.unroll` keeps.
    """

    rule: Rule
    order: int
    memory: Memory

    def run(
        self, loss: Loss, params: Params, x: Tensor, y: Tensor, labels: Labels | None, steps: int
    ) -> Adaptation:
        """Take ``steps`` steps on ``loss(params, x, y, labels)``; differentiable where grad mode is on."""
        if steps == 0:
            return Adaptation(params, next(iter(params.values())).new_zeros((0, x.shape[0])))
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "MAML: inner steps need gradients, which torch.inference_mode() does not allow. Use "
                "torch.no_grad(), under which MAML adapts all the same."
            )
        second_order = self.order == 2 and torch.is_grad_enabled()

        def step(state: tuple, t: int, x: Tensor, y: Tensor) -> tuple[tuple, Tensor]:
            params, rule_state = state
            with phase("inner", t):
                losses, _ = loss(params, x, y, labels)
                grads = _gradients(losses.sum(), params, second_order)
                state = self.rule.update(grads, rule_state, params)
            return state, losses

        state = (params, self.rule.init(params))
        (params, _), losses = unroll(step, state, x, y, steps=steps, memory=self.memory)
        return Adaptation(params, losses)


def _gradients(loss: Tensor, params: Params, create_graph: bool) -> Params:
    """Differentiate; a parameter that the loss does not use gets zeros, its exact gradient."""
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=create_graph, allow_unused=True)
    if all(gradient is None for gradient in grads):
        raise ValueError(
            "MAML: the inner loss depends on none of the parameters that are adapted, so there is nothing to "
            "learn from the support examples. Does the model detach its output?"
        )
    return {
        name: torch.zeros_like(param) if gradient is None else gradient
        for (name, param), gradient in zip(params.items(), grads, strict=True)
    }


def outer_phase() -> contextlib.AbstractContextManager:
    """Open an outer step of the memory tracker, if one is open and nobody has opened a phase."""
    tracker = memory_tracking.current()
    return contextlib.nullcontext() if tracker is None else tracker.implied_outer()


def phase(name: str, index: int | None = None) -> contextlib.AbstractContextManager:
    """Open a phase of the memory tracker, if one is open."""
    tracker = memory_tracking.current()
    return contextlib.nullcontext() if tracker is None else tracker.phase(name, index=index)
