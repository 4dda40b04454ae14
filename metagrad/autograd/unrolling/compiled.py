"""Loops of compiled steps: ``torch.compile`` of a pure function, whose compiled derivative autograd calls.

Everything that changes from step to step or from call to call is an argument: the state, the number of the step,
data and hyperparameters. So one compiled function serves any number of steps. ``torch.compile`` guards the rest.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from metagrad.autograd.recompute.checkpoint import cannot_recompute
from metagrad.autograd.unrolling.schedule import Loop, Step, in_turn, loop_keeping, plain
from metagrad.autograd.unrolling.steps import Arguments, Pair, StateCheck, checked_pair, stack
from metagrad.core._torch import Function
from metagrad.core.budget import BudgetError, device_of
from metagrad.core.capture import AutocastState, RandomState
from metagrad.core.checks import warn
from metagrad.core.norms import unfused_attention
from metagrad.core.reach import ReachableObjects
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Structure, Tree, dissect, fresh_leaf, is_differentiable, tree_map

T = TypeVar("T")
Compile: TypeAlias = "bool | Mapping[str, Any]"
"""True to compile, or the keyword arguments of ``torch.compile``."""

SMALL = 2**18
"""Maximum number of elements of small steps. For such steps, the overhead of a call exceeds the time of the
step."""
SEVERAL = 5
"""Number of small steps that are compiled together."""


def checked_compile(call: str, compile: Compile) -> dict[str, Any] | None:
    """Return the arguments of ``torch.compile``, or None for eager execution."""
    if isinstance(compile, (bool, Mapping)):
        return dict(compile) if isinstance(compile, Mapping) else {} if compile else None
    raise ValueError(
        f"{call}: compile must be a bool, or a dict of the arguments of torch.compile, got {compile!r}."
    )


class Compiler:
    """Compiles functions, and falls back to eager execution with one warning if that fails.

    Args:
        call: How warnings name the compiled call.
        options: The arguments of ``torch.compile``.

    Attributes:
        by_steps: True if steps are compiled one at a time, since one function of a whole loop does not help.
        compiles_products: True if vector-Jacobian products of steps can be compiled on their own.
        rule: The last rule, its dtype and device, and its parts.
        reason: Why the compiler fell back to eager execution, or None.
    """

    def __init__(self, call: str, options: Mapping[str, Any]) -> None:
        self.call, self.options = call, options
        self.by_steps, self.compiles_products = False, True
        self.rule: tuple[object, object, tuple[list[Tensor], Structure]] | None = None
        self.reason: str | None = None
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle only the options, without compiled functions."""
        return type(self), (self.call, self.options)

    def of(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return the compiled form of a module-level function."""
        if function not in self._functions:
            # Torch caches compiled code by code object, so this compiler needs a code object of its own.
            own = types.FunctionType(function.__code__.replace(), function.__globals__)
            options = {"fullgraph": True, "dynamic": False, **self.options}
            self._functions[function] = torch.compile(own, **options)
        return self._functions[function]

    def attempt(self, compiled: Callable[[], T], eager: Callable[[], T], reason: str | None = None) -> T:
        """Return ``compiled()``. Return ``eager()`` if there is a reason, or if ``compiled()`` raises."""
        reason = reason or self.reason or cannot_recompute()
        if reason is None:
            try:
                return compiled()
            except (torch.OutOfMemoryError, BudgetError):
                raise
            except Exception as error:  # Dynamo, inductor and the traced code raise errors of many kinds
                reason = f"torch.compile cannot take it: {_summary(error)}"
            result = eager()  # which raises the errors of the function itself
            self.reason = reason
        else:
            result = eager()
        if reason not in self._warned:
            self._warned.add(reason)
            warn(
                f"{self.call}: runs without being compiled, because {reason}. Pass compile=False to choose this."
            )
        return result

    def unroll(self, step: Step, state: Tree, args: Arguments, times: range, memory: str | int) -> Pair:
        """Run a loop. ``t``, ints of the state and floats of the arguments reach the step as 0-d tensors."""
        tensors = dissect((state, args))[0]
        device = device_of(state, args)
        is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
        dtype = torch.float64 if is_double else torch.float32
        state = tree_map(
            lambda leaf: _tensor(leaf, torch.int64, device) if type(leaf) is int else leaf, state
        )
        args = tree_map(lambda leaf: _tensor(leaf, dtype, device) if _varies(leaf) else leaf, args)
        is_small = sum(tensor.numel() for tensor in tensors) <= SMALL
        width = SEVERAL if is_small and len(times) >= SEVERAL else 1
        in_pieces = functools.partial(_in_pieces, self._piece, width)
        if not torch.is_grad_enabled():
            return in_pieces(step, state, args, times)
        pulled = functools.partial(self._pulled, ReachableObjects(step).modules)
        loops: dict[str, Loop] = {
            "full": functools.partial(_in_pieces, pulled, width) if is_small else in_pieces,
            "step": functools.partial(_in_pieces, pulled, 1),
            "sqrt": functools.partial(_in_pieces, self._again(in_pieces), max(math.isqrt(len(times)), 1)),
        }
        return loop_keeping(memory, (state, args), loops)(step, state, args, times)

    def _piece(self, step: Step, state: Tree, args: Arguments, times: range) -> Pair:
        """Run consecutive steps as one compiled function."""
        state, args = tree_map(_entering, state), tree_map(functools.partial(_entering, keeps=True), args)
        number = torch.full((), times.start, dtype=torch.int64, device=device_of(state))
        new, aux = self.of(_advance)(step, len(times), state, number, args)
        StateCheck(state)(new, times[-1])
        return new, aux

    def _pulled(
        self, modules: Sequence[nn.Module], step: Step, state: Tree, args: Arguments, times: range
    ) -> Pair:
        """Run consecutive steps without their graph. A compiled function runs them again for their derivative."""
        if not self.compiles_products:
            return self._again(self._piece)(step, state, args, times)
        tensors, structure = dissect((state, args))
        number = torch.full((), times.start, dtype=torch.int64, device=device_of(state))
        modes, autocast, drawn = _modes(modules), AutocastState(), torch.get_rng_state()
        constants = structure.fill([tensor.detach().contiguous() for tensor in tensors])
        new, aux = self.of(_advance)(step, len(times), constants[0], number, constants[1])
        StateCheck(state)(new, times[-1])
        outputs, form = dissect((new, aux))
        if any(output.requires_grad for output in outputs) or not torch.equal(drawn, torch.get_rng_state()):
            # The step reads another tensor that requires grad, or draws random numbers.
            self.compiles_products = False
            return self._pulled(modules, step, state, args, times)
        width = len(dissect(state)[0])
        places = [i for i, t in enumerate(tensors) if is_differentiable(t) and (i < width or t.requires_grad)]

        def eager(tensors: Sequence[Tensor]) -> list[Tensor]:
            state, args = structure.fill(tensors)
            return dissect(_advance(step, len(times), state, number, args))[0]

        def pull(tensors: Sequence[Tensor], given: dict[int, Tensor]) -> list[Tensor | None]:
            if _modes(modules) != modes:
                raise RuntimeError(_CHANGED)
            given = {**{i: torch.zeros_like(tensors[i]) for i in places if i < width}, **given}
            cotangents = [cotangent.contiguous() for cotangent in given.values()]
            constants = [tensor.detach().contiguous() for tensor in tensors]
            compiled = self.of(_pull)
            with autocast.restored(), unfused_attention():
                found = self.attempt(
                    lambda: compiled(
                        step, len(times), structure, places, [*given], constants, number, cotangents
                    ),
                    lambda: _eager_pull(eager, places, constants, given),
                )
            return [dict(zip(places, found, strict=True)).get(i) for i in range(len(tensors))]

        return form.fill(_CompiledSteps.apply(pull, eager, outputs, *tensors))

    def _again(self, loop: Loop) -> Loop:
        """Return a loop that stores only its operands and is run again in the backward pass."""

        def recomputed(step: Step, state: Tree, args: Arguments, times: range) -> Pair:
            tensors, structure = dissect((state, args))
            modules, random, autocast = ReachableObjects(step).modules, RandomState(), AutocastState()
            found: list[Structure] = []

            def call(loop: Loop, tensors: Sequence[Tensor]) -> list[Tensor]:
                state, args = structure.fill(tensors)
                with torch.enable_grad(), autocast.restored():
                    outputs, form = dissect(loop(step, state, args, times))
                found.append(form)
                return outputs

            def again(tensors: Sequence[Tensor]) -> list[Tensor]:
                if _modes(modules) != modes:
                    raise RuntimeError(_CHANGED)
                with unfused_attention():
                    return self.attempt(
                        lambda: random.restored()(call)(loop, tensors),
                        lambda: random.restored()(call)(plain, tensors),
                    )

            modes = _modes(modules)
            leaves = list(map(fresh_leaf, tensors))
            outputs = call(loop, leaves)
            known = set(map(id, leaves))
            variables = (getattr(node, "variable", None) for node in graph_nodes(outputs))
            free = [v for v in variables if v is not None and id(v) not in known]
            return found[0].fill(_RerunOutputs.apply(again, len(tensors), outputs, *tensors, *free))

        return recomputed


def _pull(
    step: Step,
    count: int,
    structure: Structure,
    places: Sequence[int],
    given: Sequence[int],
    tensors: Sequence[Tensor],
    t: Tensor,
    cotangents: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Compute the vector-Jacobian product of steps."""

    def results(wanted: list[Tensor]) -> list[Tensor]:
        every = list(tensors)
        for place, tensor in zip(places, wanted, strict=True):
            every[place] = tensor
        state, args = structure.fill(every)
        outputs = dissect(_advance(step, count, state, t, args))[0]
        return [outputs[i] for i in given]

    pull: Any = torch.func.vjp(results, [tensors[place] for place in places])[1]
    return pull(list(cotangents))[0]


def _eager_pull(
    eager: Callable[[Sequence[Tensor]], list[Tensor]],
    places: Sequence[int],
    tensors: Sequence[Tensor],
    given: Mapping[int, Tensor],
) -> Sequence[Tensor | None]:
    with torch.enable_grad():
        inputs = [t.requires_grad_() if i in places else t for i, t in enumerate(tensors)]
        outputs = eager(inputs)
    present = [(outputs[i], cotangent) for i, cotangent in given.items() if outputs[i].requires_grad]
    return _gradients(present, [inputs[place] for place in places])


class _CompiledSteps(Function):
    """Outputs of compiled steps, which run again for a derivative (eagerly for a second one)."""

    @staticmethod
    def forward(ctx, pull, eager, outputs, *tensors):
        ctx.set_materialize_grads(False)
        ctx.pull, ctx.eager = pull, eager
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(output for output in outputs if not is_differentiable(output)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *cotangents):
        given = {i: cotangent for i, cotangent in enumerate(cotangents) if cotangent is not None}
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        if not torch.is_grad_enabled():
            return (None, None, None, *ctx.pull(tensors, given))
        # Views separate a state from an argument that it was computed from. Each has its own derivative.
        inputs = [t.view_as(t) if need else t for t, need in zip(tensors, needed, strict=True)]
        outputs, wanted = ctx.eager(inputs), [t for t, need in zip(inputs, needed, strict=True) if need]
        present = [(outputs[i], c) for i, c in given.items() if outputs[i].requires_grad]
        grads = iter(_gradients(present, wanted, create_graph=True))
        return (None, None, None, *(next(grads) if need else None for need in needed))


_CHANGED = (
    "unroll(..., compile): a buffer, the mode or a number of a module changed before the backward pass, which runs "
    "the steps again."
)


def _advance(step: Step, count: int, state: Tree, t: Tensor, args: Arguments) -> Pair:
    collected = []
    for ahead in range(count):
        state, aux = checked_pair(step(state, t + ahead if ahead else t, *args.at(ahead)), -1)
        collected.append(aux)
    # All calls use one layout, so that torch does not compile the step again.
    return tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, state), stack(
        collected
    )


def _in_pieces(loop: Loop, width: int, step: Step, state: Tree, args: Arguments, times: range) -> Pair:
    """Run a loop on ``width`` steps at a time, and on each of the remaining steps."""
    whole = len(times) - len(times) % width
    parts = [times[first : first + width] for first in range(0, whole, width)]
    singles = [times[index : index + 1] for index in range(whole, len(times))]
    return in_turn([(loop, part) for part in (*parts, *singles)], step, state, args)


def _modes(modules: Sequence[nn.Module]) -> list[object]:
    """Return the flags and numbers of modules, and the versions of their buffers."""
    plain = [{k: v for k, v in vars(m).items() if isinstance(v, (int, float, str))} for m in modules]
    return [plain, [buffer._version for module in modules for buffer in module.buffers(recurse=False)]]


class _RerunOutputs(Function):
    """Outputs of a function that is run again for its derivative."""

    @staticmethod
    def forward(ctx, call, count, outputs, *operands):
        ctx.set_materialize_grads(False)
        ctx.call, ctx.count = call, count
        ctx.save_for_backward(*operands)
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(r for r, output in zip(results, outputs, strict=True) if not output.requires_grad)
        )
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents):
        tensors = [*map(fresh_leaf, ctx.saved_tensors[: ctx.count]), *ctx.saved_tensors[ctx.count :]]
        outputs = ctx.call(tensors[: ctx.count])
        wanted = [t for t, need in zip(tensors, ctx.needs_input_grad[3:], strict=True) if need]
        given = [(output, c) for output, c in zip(outputs, cotangents, strict=True) if c is not None]
        grads = iter(_gradients(given, wanted) if given else ())
        return (None, None, None, *(next(grads, None) if need else None for need in ctx.needs_input_grad[3:]))


def _gradients(
    given: Sequence[tuple[Tensor, Tensor]], wanted: Sequence[Tensor], *, create_graph: bool = False
) -> Sequence[Tensor | None]:
    outputs, cotangents = zip(*given, strict=True)
    return torch.autograd.grad(
        outputs, wanted, cotangents, retain_graph=True, create_graph=create_graph, allow_unused=True
    )


def _entering(leaf: Any, *, keeps: bool = False) -> Any:
    """Return a contiguous tensor that requires grad and is no leaf, so that all steps get the same kind of input.

    Args:
        leaf: A tensor, or a constant, which is returned unchanged.
        keeps: True if a tensor that does not require grad must not require it afterwards.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    if not torch.is_grad_enabled() or not is_differentiable(leaf) or (keeps and not leaf.requires_grad):
        return leaf.detach().contiguous()
    if leaf.grad_fn is None:
        leaf = (leaf if leaf.requires_grad else leaf.detach().requires_grad_()).clone()
    return leaf.contiguous()


def _tensor(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), number, dtype=dtype, device=device)


def _varies(leaf: object) -> bool:
    """Return whether a leaf is a float other than 0 and 1.

    The formulas of optimizers depend on whether a number is 0 or 1.
    """
    return type(leaf) is float and leaf not in (0.0, 1.0)


def _summary(error: Exception) -> str:
    """Return the first two lines of an error."""
    lines = str(error).strip().splitlines()[:2] or [type(error).__name__]
    return " ".join(map(str.strip, lines)).rstrip(".")
