"""Differentiable inner loops: ``state = step(state, t, *args)``, as often as asked, with memory as an argument."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from metagrad.autograd.recompute.checkpoint import cannot_recompute
from metagrad.autograd.unrolling.compiled import Compile, Compiler, checked_compile
from metagrad.autograd.unrolling.schedule import Step, in_turn, loop_keeping, plain
from metagrad.autograd.unrolling.steps import checked_pair
from metagrad.core.budget import Memory, MemoryMode, checked_memory
from metagrad.core.checks import check_function, is_integer, warn
from metagrad.core.tree import Tree, constants, detached, tree_map


def unroll(
    step: Step,
    state: Tree,
    *args: Tree,
    steps: int,
    memory: Memory = "full",
    truncate: int | None = None,
    create_graph: bool | None = None,
    compile: Compile = False,
) -> tuple[Tree, Tree]:
    r"""Run an inner loop and make its result differentiable with respect to the state and the arguments.

    .. math:: s_{t+1}, a_t = \mathrm{step}(s_t, t, \mathrm{args}), \qquad t = 0, \dots, \mathrm{steps} - 1

    ========= ================================= ======================================================
    memory    keeps                             cost
    ========= ================================= ======================================================
    "full"    every step's graph                a plain loop
    "step"    one state for each step           each step again in the backward pass, at every order
    "sqrt"    every :math:`\sqrt{T}`-th state   each step twice again
    bytes     what fits                         the last steps, as many as fit, keep their graphs
    "auto"    what fits into the free memory    likewise
    ========= ================================= ======================================================

    All return the same values and the same gradients, of any order: a step that does not repeat its computation when
    it is recomputed is an error, see :func:`metagrad.checkpoint`. A budget is a number of bytes or a string such
    as ``"512MiB"``. The first two steps are measured (the storages that their graphs, states and aux hold), and all
    graphs are kept if they fit. The graphs and states that are kept stay below the budget, and the backward pass
    needs, beside them, what the derivative of one step needs. ``"step"`` is not smaller than ``"full"`` where the
    graph of a step holds less than a state does (a large table of which a few rows are read); budgets and ``"auto"``
    keep the graphs there.

    ``compile=True`` compiles one step with its derivative by ``torch.compile``, and reuses it for all steps.
    Five steps on small tensors are compiled together. The step must be a pure function, which takes its inner
    gradient by :func:`torch.func.grad`. ``t``, the ints of the state (counters) and the floats among the arguments
    (learning rates) reach it as 0-d tensors. A step that cannot be compiled runs eagerly, with one warning that says
    why. A derivative of the result can be differentiated again if the steps are small; else torch raises an error.

    Args:
        step: ``step(state, t, *args) -> (state, aux)``. The state it returns has the structure, shapes and
            dtypes of the one it takes. ``aux`` is a tree of tensors (an inner loss, say) or None. A gradient
            inside it needs ``create_graph=True`` to be differentiated through.
        state: A tree of tensors and constants.
        *args: Trees of tensors and constants, the same for every step (data, learning rates).
        steps: How many steps, 0 or more.
        memory: What is kept for the derivative.
        truncate: Differentiate through the last so many steps alone and take the state before them as a constant
            (truncated reverse mode); None differentiates through all.
        create_graph: Whether the result is differentiable; None means if grad mode is on. False detaches every
            state, so that memory does not grow with ``steps``; the steps themselves always run in grad mode.
        compile: Whether to compile; a dict holds the arguments of ``torch.compile``.

    Returns:
        The last state, and ``aux`` with its tensors stacked along a new first axis, ``[steps, ...]``; None
        when ``steps`` is 0.

    Raises:
        ValueError: ``steps`` is negative, ``truncate`` is not from 1 to ``steps``, ``memory`` is unknown or a budget
            that is too small for one step (the message says how much is needed), ``step`` returns something
            else than a pair, changes the structure, a shape or a dtype of the state, or (when recomputed)
            writes in place.
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
        ICML 2015; Griewank, Walther, "Evaluating Derivatives", 2nd ed., section 12; Shaban et al., "Truncated
        back-propagation for bilevel optimization", AISTATS 2019 (``truncate``).
    """
    check_function("unroll(step, ...)", "step", step)
    _check_steps(steps)
    _check_truncate(truncate, steps)
    mode = checked_memory("unroll(...)", memory)
    options = checked_compile("unroll(...)", compile)
    if create_graph is None:
        create_graph = torch.is_grad_enabled()
    if steps == 0:
        return state, None
    first = steps if not create_graph else 0 if truncate is None else steps - truncate
    times = range(steps)
    if options is not None:
        settings = {"steps": steps, "memory": mode, "truncate": truncate, "create_graph": create_graph}
        eager = functools.partial(unroll, step, state, *args, **settings)
        compiler = _compiler(_code(step), tuple(options.items()))
        compiled = functools.partial(
            _compiled, compiler, mode, step, state, args, times[:first], times[first:]
        )
        return compiler.attempt(compiled, eager)
    if not create_graph:
        return _without_graphs(step, state, args, times)
    if mode != "full" and (why := cannot_recompute()) is not None:
        warn(
            f"unroll(..., memory={memory!r}): called {why}, where nothing can be recomputed; every step's graph is "
            "stored. Put the loop around the transform."
        )
        mode = "full"
    loop = loop_keeping(mode, (state, args))
    with torch.enable_grad():
        if truncate is None:
            return loop(step, state, args, times)
        return in_turn([(_without_graphs, times[:first]), (loop, times[first:])], step, state, args)


def _code(step: Callable[..., Any]) -> object:
    """Return what identifies a step that is defined anew for each call: its code, or its class."""
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__code__", type(step))


@functools.lru_cache(maxsize=64)
def _compiler(code: object, options: tuple[tuple[str, Any], ...]) -> Compiler:
    """Keep what was compiled of recent steps; ``torch.compile`` guards what they close over."""
    return Compiler("unroll(step, ..., compile)", dict(options))


def _compiled(
    compiler: Compiler,
    memory: MemoryMode | int,
    step: Step,
    state: Tree,
    args: tuple[Any, ...],
    without_graphs: range,
    with_graphs: range,
) -> tuple[Tree, Tree]:
    def loop(step: Step, state: Tree, args: tuple[Any, ...], times: range) -> tuple[Tree, Tree]:
        return compiler.unroll(step, state, args, times, memory)

    pieces = [(torch.no_grad()(loop), without_graphs), (torch.enable_grad()(loop), with_graphs)]
    last, aux = in_turn(pieces, step, state, args)
    return tree_map(lambda old, new: int(new) if type(old) is int else new, state, last), aux


def _check_truncate(truncate: int | None, steps: int) -> None:
    if truncate is None:
        return
    if not is_integer(truncate) or not 1 <= truncate <= max(steps, 1):
        raise ValueError(
            f"unroll(..., truncate): expected None or an int from 1 to steps={steps}, the number of last steps to "
            f"differentiate through, got {truncate!r}."
        )


def _check_steps(steps: int) -> None:
    if not is_integer(steps):
        raise TypeError(f"unroll(..., steps): expected an int, got {type(steps).__name__}.")
    if steps < 0:
        raise ValueError(f"unroll(..., steps): expected 0 or more, got {steps}.")


def _without_graphs(step: Step, state: Tree, args: tuple[Any, ...], times: range) -> tuple[Tree, Tree]:
    def detached_step(state: Tree, t: int, *args: Tree) -> tuple[Tree, Tree]:
        with torch.enable_grad():
            state, aux = checked_pair(step(state, t, *args), t)
        return detached(state), constants(aux)

    return plain(detached_step, state, args, times)
