"""Differentiable inner loops: ``state = step(state, t, *args)``, as often as asked, with memory as an argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from metagrad._tree import Tree, detached, tree_map
from metagrad.autograd.steps import StateCheck, checked_pair, stack
from metagrad.autograd.sweep import unroll_recomputed

Step = Callable[..., tuple[Tree, Tree]]
Memory = Literal["full", "step"]


def unroll(
    step: Step,
    state: Tree,
    *args: Tree,
    steps: int,
    memory: Memory = "full",
    create_graph: bool | None = None,
) -> tuple[Tree, Tree]:
    r"""Run an inner loop and make its result differentiable with respect to the state and the arguments.

    .. math:: s_{t+1}, a_t = \mathrm{step}(s_t, t, \mathrm{args}), \qquad t = 0, \dots, \mathrm{steps} - 1

    ======== ============================== ==================================================
    memory   keeps                          cost
    ======== ============================== ==================================================
    "full"   every step's graph             a plain loop
    "step"   one state a step               each step again in the reverse sweep, at every order
    ======== ============================== ==================================================

    Both return the same values and the same gradients, of any order.

    Args:
        step: ``step(state, t, *args) -> (state, aux)``. The state it returns has the structure, shapes and
            dtypes of the one it takes. ``aux`` is a tree of tensors (an inner loss, say) or None. A gradient
            inside it needs ``create_graph=True`` to be differentiated through.
        state: A tree of tensors and constants.
        *args: Trees of tensors and constants, the same for every step (data, learning rates).
        steps: How many steps, 0 or more.
        memory: What is kept for the derivative.
        create_graph: Whether the result is differentiable; None says: if grad mode is on. False detaches every
            state, so that memory does not grow with ``steps``; the steps themselves always run in grad mode.

    Returns:
        The last state, and ``aux`` with its tensors stacked along a new first axis, ``[steps, ...]``; None
        when ``steps`` is 0.

    Raises:
        ValueError: ``steps`` is negative, ``memory`` is unknown, ``step`` returns something else than a pair,
            changes the structure, a shape or a dtype of the state, or (``memory="step"``) writes in place.
        TypeError: ``steps`` is not an int, or ``aux`` holds something that is neither a tensor nor None.

    Example:
        Two steps of gradient descent on :math:`w^2/2` give :math:`w (1 - \eta)^2`:

        >>> w, lr = torch.tensor(1.0, requires_grad=True), torch.tensor(0.5, requires_grad=True)
        >>> def step(w, t, lr):
        ...     loss = w**2 / 2
        ...     return w - lr * metagrad.grad(loss, w, create_graph=True), loss
        >>> w2, losses = metagrad.unroll(step, w, lr, steps=2, memory="step")
        >>> w2.item(), losses.tolist(), metagrad.grad(w2, lr).item()
        (0.25, [0.5, 0.125], -1.0)

    References:
        Maclaurin, Duvenaud, Adams, "Gradient-based hyperparameter optimization through reversible learning",
        ICML 2015; Griewank, Walther, "Evaluating Derivatives", 2nd ed., section 12.
    """
    _check(steps, memory)
    if create_graph is None:
        create_graph = torch.is_grad_enabled()
    if steps == 0:
        return state, None
    if not create_graph:
        return _unroll_plain(step, state, args, steps, keep_graph=False)
    if memory != "full" and torch._C._are_functorch_transforms_active():
        warnings.warn(
            f'unroll(..., memory="{memory}"): called inside a torch.func transform, where nothing can be '
            "recomputed; every step's graph is stored. Put the loop around the transform.",
            stacklevel=2,
        )
        memory = "full"
    with torch.enable_grad():
        if memory == "full":
            return _unroll_plain(step, state, args, steps, keep_graph=True)
        return unroll_recomputed(step, state, args, steps)


def _check(steps: int, memory: str) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"unroll(..., steps): expected an int, got {type(steps).__name__}.")
    if steps < 0:
        raise ValueError(f"unroll(..., steps): expected 0 or more, got {steps}.")
    if memory not in get_args(Memory):
        raise ValueError(f'unroll(..., memory): expected "full" or "step", got {memory!r}.')


def _unroll_plain(step: Step, state: Tree, args: tuple, steps: int, *, keep_graph: bool) -> tuple[Tree, Tree]:
    check = StateCheck(state)
    collected = []
    for t in range(steps):
        with torch.enable_grad():
            state, aux = checked_pair(step(state, t, *args), t)
        check(state, t)
        if not keep_graph:
            state, aux = detached(state), tree_map(_without_graph, aux)
        collected.append(aux)
    return state, stack(collected)


def _without_graph(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value
