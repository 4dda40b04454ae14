"""Differentiable inner loops: ``state = step(state, t, *args)``, as often as asked, with memory as an argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from metagrad._tree import Tree, detached, leaf_names, tree_flatten, tree_map, tree_structure, tree_unflatten
from metagrad.autograd.recompute import apply_visibly, vjp
from metagrad.autograd.replay import Call, Recording, Structure, dissect, record

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
        return _unroll_recomputed(step, state, args, steps)


def _check(steps: int, memory: str) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise TypeError(f"unroll(..., steps): expected an int, got {type(steps).__name__}.")
    if steps < 0:
        raise ValueError(f"unroll(..., steps): expected 0 or more, got {steps}.")
    if memory not in get_args(Memory):
        raise ValueError(f'unroll(..., memory): expected "full" or "step", got {memory!r}.')


def _unroll_plain(step: Step, state: Tree, args: tuple, steps: int, *, keep_graph: bool) -> tuple[Tree, Tree]:
    check = _StateCheck(state)
    collected = []
    for t in range(steps):
        with torch.enable_grad():
            state, aux = _pair(step(state, t, *args), t)
        check(state, t)
        if not keep_graph:
            state, aux = detached(state), tree_map(_without_graph, aux)
        collected.append(aux)
    return state, _stack(collected)


def _without_graph(value: object) -> object:
    return value.detach() if isinstance(value, Tensor) else value


def _pair(result: object, t: int) -> tuple[Tree, Tree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"unroll(step, ...): step must return (state, aux), got {type(result).__name__} at t={t}. "
            "Return (state, None) if there is nothing to report."
        )
    return result


class _StateCheck:
    """Holds every state to the structure, shapes and dtypes of the first."""

    def __init__(self, state: Tree) -> None:
        self.state = state
        self.spec = tree_structure(state)
        self.kinds = [_kind(leaf) for leaf in tree_flatten(state)[0]]

    def __call__(self, state: Tree, t: int) -> None:
        leaves, spec = tree_flatten(state)
        if spec != self.spec:
            raise ValueError(
                f"unroll(step, ...): step must return a state of the structure it takes, {self.spec}, "
                f"got {spec} at t={t}."
            )
        for index, leaf in enumerate(leaves):
            if _kind(leaf) != self.kinds[index]:
                name = leaf_names(self.state, "state")[index]
                raise ValueError(
                    f"unroll(step, ...): step must keep shapes and dtypes; {name} was {self.kinds[index]}, "
                    f"and is {_kind(leaf)} after t={t}."
                )


def _kind(leaf: object) -> tuple:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else ("a constant",)


def _stack(collected: list[Tree]) -> Tree:
    flat = [tree_flatten(aux) for aux in collected]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("unroll(step, ...): aux must have the same structure at every step.")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_stack_column(column) for column in columns], flat[0][1])


def _stack_column(column: tuple) -> Tensor | None:
    if all(isinstance(value, Tensor) for value in column):
        return torch.stack(column)
    if all(value is None for value in column):
        return None
    kind = next(type(value).__name__ for value in column if not isinstance(value, Tensor))
    raise TypeError(f"unroll(step, ...): aux must hold tensors or None, got {kind}.")


def _unroll_recomputed(step: Step, state: Tree, args: tuple, steps: int) -> tuple[Tree, Tree]:
    """Run without graphs, and put the whole loop on the tape as one operation."""
    check = _StateCheck(state)
    sweep = _Sweep(state, args, steps)
    structure = None
    for t in range(steps):
        recording = record(step, (state, t, *args), {}, name=f"unroll(step, ...) at t={t}")
        state, aux = _pair(recording.structure.fill(recording.outputs), t)
        check(state, t)
        structure = sweep.append(recording, state, aux)
    assert structure is not None
    return sweep.attach(structure)


class _Sweep:
    """The recorded steps of one loop.

    A state is known by its tensors; the tensors of step ``t`` are those of its state, those of ``args``, and
    the free tensors that the step was seen to read.
    """

    def __init__(self, state: Tree, args: tuple, steps: int) -> None:
        self.initial, _ = dissect(state)
        self.shared, _ = dissect(args)
        self.width = len(self.initial)
        self.num_args = len(self.shared)
        self.num_steps = steps
        self.calls: list[Call] = []
        self.free: list[list[int]] = []
        self.states: list[list[Tensor]] = []
        self.aux: list[Tensor] = []
        self._free_slots: dict[int, int] = {}

    def append(self, recording: Recording, state: Tree, aux: Tree) -> tuple[Structure, Structure]:
        """Add a step; return the structures of its state and aux."""
        self.calls.append(recording.call)
        self.free.append([self._slot(tensor) for tensor in recording.call.reads.differentiable])
        state_tensors, state_structure = dissect(state)
        aux_tensors, aux_structure = dissect(aux)
        if any(leaf is not None for leaf in tree_flatten(aux)[0] if not isinstance(leaf, Tensor)):
            _stack([aux])
        self.states.append(state_tensors)
        self._write_aux(aux_tensors)
        return state_structure, aux_structure

    def _slot(self, tensor: Tensor) -> int:
        if id(tensor) not in self._free_slots:
            self._free_slots[id(tensor)] = len(self.shared)
            self.shared.append(tensor)
        return self._free_slots[id(tensor)]

    def _write_aux(self, tensors: list[Tensor]) -> None:
        """Keep aux in one buffer for all steps, so that what a step leaves behind is its state alone."""
        t = len(self.calls) - 1
        if t == 0:
            self.aux = [
                a.new_empty((self.num_steps, *a.shape)).requires_grad_(a.requires_grad) for a in tensors
            ]
        if [tuple(a.shape) for a in tensors] != [tuple(b.shape[1:]) for b in self.aux]:
            raise ValueError("unroll(step, ...): aux must have the same structure and shapes at every step.")
        with torch.no_grad():
            for buffer, value in zip(self.aux, tensors, strict=True):
                buffer[t] = value

    def attach(self, structure: tuple[Structure, Structure]) -> tuple[Tree, Tree]:
        """Put the loop on the tape, as a function of its first state, its arguments and its free tensors."""
        results = apply_visibly(_Unrolled, (self,), self.initial + self.shared)
        end = self.width * self.num_steps
        return structure[0].fill(results[end - self.width : end]), structure[1].fill(results[end:])

    def release(self) -> None:
        """Forget the tensors, which the tape keeps from now on."""
        self.initial, self.shared, self.states, self.aux = [], [], [], []

    def operands(self, t: int, states: list[Sequence[Tensor]], shared: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of step ``t``, in the order in which it was recorded."""
        return [*states[t], *shared[: self.num_args], *(shared[slot] for slot in self.free[t])]


class _Unrolled(torch.autograd.Function):
    """A loop whose derivative sweeps back over its steps, the last first, rebuilding one step at a time.

    All states are outputs: saved outputs stay on the tape, which is what makes the sweep differentiable.
    """

    @staticmethod
    def forward(ctx, sweep, *tensors):
        ctx.set_materialize_grads(False)
        ctx.sweep = sweep
        outputs = [tensor for state in sweep.states for tensor in state] + sweep.aux
        results = [output.detach() for output in outputs]
        ctx.mark_non_differentiable(
            *(r for r, output in zip(results, outputs, strict=True) if not output.requires_grad)
        )
        kept = results[: sweep.width * (sweep.num_steps - 1)]
        ctx.needed = [output.requires_grad for output in outputs[: len(kept)]]
        ctx.save_for_backward(*tensors, *kept)
        sweep.release()
        return tuple(results)

    @staticmethod
    def backward(ctx, *cotangents):
        sweep = ctx.sweep
        width, saved = sweep.width, ctx.saved_tensors
        num_inputs = len(ctx.needs_input_grad) - 1
        inputs, kept = saved[:num_inputs], saved[num_inputs:]
        states = [inputs[:width], *_rows(kept, sweep.num_steps - 1)]
        needed = [ctx.needs_input_grad[1 : 1 + width], *_rows(ctx.needed, sweep.num_steps - 1)]
        incoming = _rows(cotangents[: width * sweep.num_steps], sweep.num_steps)
        aux = cotangents[width * sweep.num_steps :]
        shared, needs_shared = inputs[width:], ctx.needs_input_grad[1 + width :]
        totals: list[Tensor | None] = [None] * len(shared)
        current: Sequence[Tensor | None] = [None] * width
        for t in reversed(range(sweep.num_steps)):
            slots = [*range(sweep.num_args), *sweep.free[t]]
            grads = vjp(
                sweep.calls[t],
                sweep.operands(t, states, shared),
                [*needed[t], *(needs_shared[slot] for slot in slots)],
                [*_add(current, incoming[t]), *(None if a is None else a[t] for a in aux)],
            )
            current = grads[:width]
            for slot, gradient in zip(slots, grads[width:], strict=True):
                totals[slot] = _plus(totals[slot], gradient)
        return (None, *current, *totals)


def _rows(flat: Sequence, num_rows: int) -> list[Sequence]:
    width = len(flat) // max(num_rows, 1)
    return [flat[row * width : (row + 1) * width] for row in range(num_rows)]


def _add(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [_plus(a, b) for a, b in zip(left, right, strict=True)]


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
