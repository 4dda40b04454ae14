"""Differentiable inner loops ``state = step(state, t, *args)`` with a checkpointing policy as an argument."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.autograd.recompute.checkpoint import cannot_recompute
from metagrad.autograd.unrolling.compiled import Compile, Compiler, checked_compile
from metagrad.autograd.unrolling.schedule import Loop, Step, few_states, in_turn, loop_keeping, plain
from metagrad.autograd.unrolling.statistics import StatisticsGuard, checked_statistics
from metagrad.autograd.unrolling.steps import Arguments, Pair, checked_pair, rows_of
from metagrad.core.budget import Memory, MemoryMode, checked_memory
from metagrad.core.checks import check_count, check_function, check_type, is_integer, warn
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import checked_reruns
from metagrad.core.tree import Tree, constants, detached, dissect, tree_map


def unroll(
    step: Step,
    state: Tree,
    *args: Tree,
    steps: int,
    inputs: Tree = None,
    memory: Memory = "full",
    states: int | None = None,
    truncate: int | None = None,
    create_graph: bool | None = None,
    compile: Compile = False,
) -> Pair:
    r"""Run an inner loop and make its result differentiable with respect to the state and the arguments.

    .. math:: s_{t+1}, a_t = \mathrm{step}(s_t, t, \mathrm{args}), \qquad t = 0, \dots, \mathrm{steps} - 1

    ========= ================================= ======================================================
    memory    stores                            extra computation
    ========= ================================= ======================================================
    "full"    the graph of every step           none
    "step"    one state for each step           each step once more in the backward pass, at every order
    "sqrt"    a state for each segment of the   each step once more in the backward pass
              loop, and the graphs of one segment
    "log"     :math:`2 \log_2 T` states         each step 2 to 3.5 times more, for T up to 10,000
    bytes     as much as fits                   early steps as "sqrt" or "log", last steps none
    "auto"    as much as fits the free memory   early steps as "sqrt" or "log", last steps none
    ========= ================================= ======================================================

    All memory modes return the same values and the same gradients of any order. ``"step"``, ``"sqrt"`` and ``"log"``
    are gradient checkpointing. A recomputed step that does not repeat its computation raises an error, see
    :func:`metagrad.checkpoint`.

    ``"sqrt"`` measures the first step and chooses the length of the segments. They need about
    :math:`2 \sqrt{T s g}` bytes for states of s bytes and graphs of g bytes. ``"step"`` needs at least about as much.

    A budget is a number of bytes or a string such as ``"512MiB"``. The storages that the graphs, states and aux of
    the first two steps hold are measured. All graphs are stored if they fit. Stored graphs and states stay below the
    budget. The backward pass needs the memory of the derivative of one step in addition. ``"step"`` is not
    smaller than ``"full"`` if the graph of a step is smaller than a state. An example is a large table if a step
    indexes only a few rows. Budgets and ``"auto"`` store the graphs in this case.

    ``compile=True`` compiles one step and its derivative with ``torch.compile`` and reuses them for all steps. Five
    steps on small tensors are compiled together. The step must be a pure function and use :func:`torch.func.grad` for
    its inner gradient. ``t``, the ints of the state and the floats among the arguments other than 0 and 1 become 0-d
    tensors. A step that cannot be compiled runs eagerly, with one warning that gives the reason. A derivative of the
    result can be differentiated again if the steps are small. A second derivative of larger compiled steps
    raises an error of torch.

    Args:
        step: ``step(state, t, *args) -> (state, aux)``. The returned state has the structure, shapes and dtypes of
            the state before. ``aux`` is a pytree of tensors, such as an inner loss, or None. A gradient inside the
            step needs ``create_graph=True`` to be differentiated through. With respect to a tensor of the
            state, or to a tensor in ``*args``, it is a partial derivative: each of them is a variable of its own.
        state: A pytree of tensors and constants.
        *args: Pytrees of tensors and constants, the same for every step. Examples are data and learning rates.
        steps: Number of steps, 0 or more.
        inputs: A pytree of tensors with a first axis of length ``steps``, such as a mini-batch for each step. Step t
            is called as ``step(state, t, row, *args)``, where ``row`` holds row t of each tensor. The gradient of a
            step has the size of its row. The gradient of an argument in ``*args`` has the size of the whole argument
            at every step.
        memory: The checkpointing policy.
        states: Number of states to store at a time, 2 or more, in place of ``memory``. Compiled loops do not support
            it.
        truncate: Differentiate only through the last ``truncate`` steps. The state before them is a constant. None
            differentiates through all steps.
        create_graph: True if the result is differentiable. The default is the grad mode. False detaches every state,
            so that memory does not grow with ``steps``. The steps always run in grad mode.
        compile: True to compile, or a dict of the arguments of ``torch.compile``.

    Returns:
        The last state, and ``aux`` with its tensors stacked along a new first axis, ``[steps, ...]``. ``aux`` is None
        if ``steps`` is 0.

    Raises:
        ValueError: ``steps`` is negative, ``truncate`` is not from 1 to ``steps``, or ``memory`` is unknown. A budget
            is too small for one step, and the message gives the minimum. ``step`` does not return a pair, or it
            changes the structure, a shape or a dtype of the state. A recomputed step writes in place. A tensor in
            ``inputs`` does not have one row for each step.
        RuntimeError: A norm in evaluation mode reads running statistics that a differentiable step updated. A later
            call of the norm also raises, if its output depends on the result.
        TypeError: ``steps`` is no int, or ``aux`` holds something else than tensors and None.

    Example:
        Two steps of gradient descent on :math:`w^2/2` return :math:`w (1 - \eta)^2`:

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
    check_type("unroll(..., steps)", steps, int)
    check_count("unroll(..., steps)", steps, 0)
    _check_truncate(truncate, steps)
    mode = checked_memory("unroll(...)", memory)
    options = checked_compile("unroll(...)", compile)
    check_count("unroll(..., states)", states, 2, optional=True)
    if states is not None and options is not None:
        raise ValueError(
            "unroll(..., states, compile): a compiled loop cannot keep a number of states. Use memory=."
        )
    if create_graph is None:
        create_graph = torch.is_grad_enabled()
    rows = () if inputs is None else rows_of(inputs, steps)
    if steps == 0:
        return state, None
    first = steps if not create_graph else 0 if truncate is None else steps - truncate
    if create_graph and (states or mode != "full"):
        _warn_of_lists(step, steps)
    times = range(steps)
    statistics = StatisticsGuard(step)

    def run(loop: Loop) -> Pair:
        pieces = [(torch.no_grad()(loop), times[:first]), (torch.enable_grad()(loop), times[first:])]
        return in_turn(pieces, step, state, Arguments(args, rows))

    def checked_loop(step: Step, state: Tree, args: Arguments, times: range) -> Pair:
        is_recomputed = (states or mode in ("step", "log")) and cannot_recompute() is None
        return run_loop(_checked(step, not is_recomputed), _views(state), args, times, mode, states)

    eager = functools.partial(run, checked_loop)
    compiles = False
    if options is None:
        last, aux = eager()
    else:
        compiler = _compiler(_code(step), tuple(options.items()))
        compiled = functools.partial(run, functools.partial(compiler.unroll, memory=mode))
        reason = statistics.reason if create_graph else None
        last, aux = compiler.attempt(compiled, eager, reason)
        compiles = reason is compiler.reason is None
        last = tree_map(lambda old, new: int(new) if type(old) is int else new, state, last)
    statistics.guard(last, compiled=compiles)
    return last, aux


def _checked(step: Step, keeps_graphs: bool) -> Step:
    """Return a step that raises for modules that would give a wrong derivative.

    A gradient with respect to the state or an argument is a partial derivative, also if the state was computed from
    the argument. So each step gets views. The states of recomputed steps are unrelated tensors anyway.
    """
    updated: set[nn.Module | Tensor] | None = set() if torch.is_grad_enabled() else None

    def checked_step(state: Tree, t: int, *args: Any) -> Pair:
        state = _views(state) if keeps_graphs else state
        own = [_views(arg) if isinstance(arg, Tensor) else arg for arg in args]  # a step may fill containers
        with checked_reruns("unroll(step, ...)"), checked_statistics(updated):
            return step(state, t, *own)

    return checked_step


@torch.enable_grad()
def _views(state: Tree) -> Tree:
    tensors, structure = dissect(state)
    return structure.fill([t.view_as(t) if t.layout == torch.strided else t for t in tensors])


def run_loop(
    step: Step,
    state: Tree,
    args: Arguments,
    times: range,
    memory: MemoryMode | int,
    states: int | None = None,
) -> Pair:
    """Run steps under a memory mode. The result is differentiable in grad mode."""
    if not torch.is_grad_enabled():
        return _without_graphs(step, state, args, times)
    if memory != "full" and (why := cannot_recompute()) is not None:
        warn(
            f"unroll(..., memory={memory!r}): called {why}, where nothing can be recomputed; every step's graph is "
            "stored. Put the loop around the transform."
        )
        memory, states = "full", None
    if states is not None:
        return few_states(step, state, args, times, states)
    return loop_keeping(memory, (state, args))(step, state, args, times)


def _warn_of_lists(step: Step, steps: int) -> None:
    """Warn if each of many steps reads all tensors of a list, of which it probably needs one."""
    lists = Counter(
        id(at.holder) for at, _ in ReachableObjects(step).tensors if not isinstance(at.holder, dict)
    )
    if steps >= 50 and max(lists.values(), default=0) >= steps:
        warn(
            f"unroll(step, ...): the step reads a list of {steps} tensors, and each step records all of them. Stack "
            "them and pass them as inputs=, so that step t receives row t."
        )


def _code(step: Callable[..., Any]) -> object:
    """Return the code of a step, or its class.

    The code identifies a step that is defined again in each call.
    """
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__code__", type(step))


@functools.lru_cache(maxsize=64)
def _compiler(code: object, options: tuple[tuple[str, Any], ...]) -> Compiler:
    """Return the compiler of a step. It is cached, and ``torch.compile`` guards the closure of the step."""
    return Compiler("unroll(step, ..., compile)", dict(options))


def _check_truncate(truncate: int | None, steps: int) -> None:
    if truncate is None:
        return
    if not is_integer(truncate) or not 1 <= truncate <= max(steps, 1):
        raise ValueError(
            f"unroll(..., truncate): expected None or an int from 1 to steps={steps}, the number of last steps to "
            f"differentiate through, got {truncate!r}."
        )


def _without_graphs(step: Step, state: Tree, args: Arguments, times: range) -> Pair:
    def detached_step(state: Tree, t: int, *args: Tree) -> Pair:
        with torch.enable_grad():
            state, aux = checked_pair(step(state, t, *args), t)
        return detached(state), constants(aux)

    return plain(detached_step, state, args, times)
