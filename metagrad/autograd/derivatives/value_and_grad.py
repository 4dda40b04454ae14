"""Values and gradients with respect to arguments, which can be compiled and differentiated once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from metagrad.autograd.checks.lint import refuse_defects
from metagrad.autograd.unrolling.compiled import Compile, Compiler, checked_compile
from metagrad.core._torch import gradients_or_none
from metagrad.core.capture import RandomState
from metagrad.core.checks import check_count, check_function, is_a, refuse
from metagrad.core.modules import buffer_versions
from metagrad.core.reach import ReachableObjects
from metagrad.core.tree import (
    Tree,
    as_variable,
    dissect,
    fresh_leaf,
    is_differentiable,
    tree_flatten,
    tree_map,
    zeros_for_none,
)

_CALL = "value_and_grad(fn)"
_COMPARED = 2
"""Number of calls with the same shapes whose compiled results are compared with eager ones."""


def value_and_grad(
    fn: Callable[..., Tensor], argnum: int = 0, *, compile: Compile = False
) -> Callable[..., tuple[Tensor, Tree]]:
    r"""Return a function that computes a value and its gradient with respect to an argument.

    .. math:: (x, \ldots) \mapsto \Big(f(x, \ldots), \; \nabla_x \sum_i f_i(x, \ldots)\Big)

    If each value depends on its own row of the argument, the gradient holds the gradient of each value. Examples are
    energies with forces, the residuals of differential equations, and gradient penalties. Both results are
    differentiable with respect to all arguments and to parameters that ``fn`` reads: any number of times, or once if
    they are compiled. ``fn`` can call such a function itself, for second derivatives.

    ``compile=True`` compiles value and gradient together with ``torch.compile``, and autograd calls the compiled
    derivative of both. The first two calls for each shape also run eagerly. Their values, gradients and
    derivatives are compared, and the eager results are returned. The function then runs eagerly, with one warning, if
    results differ, if ``fn`` draws random numbers or writes buffers, or if it cannot be compiled.

    Args:
        fn: A function of pytrees of tensors that returns a real floating point tensor of any shape.
        argnum: The number of the argument.
        compile: True to compile, or a dict of the arguments of ``torch.compile``.

    Returns:
        A function with the arguments of ``fn``. It returns the value, and the gradient as a pytree like the argument.

    Raises:
        ValueError: In a call: the value does not depend on the argument, or its gradient has an incorrect or missing
            derivative, see :func:`metagrad.autograd.lint`.
        TypeError: In a call: ``fn`` returns something else, or the argument has no floating point tensors.
        RuntimeError: A backward pass through compiled results has ``create_graph=True`` or ``retain_graph=True``.

    Example:
        The energy of a spring and its force:

        >>> energy = lambda x, k: k * x**2 / 2
        >>> k = torch.tensor(3.0, requires_grad=True)
        >>> value, gradient = metagrad.autograd.value_and_grad(energy)(torch.tensor([1.0, 2.0]), k)
        >>> value.tolist(), gradient.tolist(), metagrad.grad(gradient.sum(), k).item()
        ([1.5, 6.0], [3.0, 6.0], 3.0)
    """
    check_function(_CALL, "fn", fn)
    check_count(f"{_CALL}: argnum", argnum, 0)
    options = checked_compile(_CALL, compile)
    eager = _ValueAndGrad(fn, argnum)
    return eager if options is None else _Compiled(eager, {"dynamic": None, **options})


class _ValueAndGrad:
    """The value and the gradient, on the autograd graph."""

    def __init__(self, fn: Callable[..., Tensor], argnum: int) -> None:
        self.fn = fn
        self.argnum = argnum

    def __call__(self, *args: Tree) -> tuple[Tensor, Tree]:
        """Return the value and the gradient."""
        if torch.compiler.is_compiling():
            return _traced(self.fn, self.argnum, args)
        if len(args) <= self.argnum:
            refuse(
                f"{_CALL}(*args)",
                f"more than {self.argnum} arguments, as argnum={self.argnum} needs",
                len(args),
            )
        has_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            own = list(args)
            own[self.argnum] = tree_map(_variable, args[self.argnum])
            leaves, structure = dissect(own[self.argnum])
            if not leaves or not all(map(is_differentiable, leaves)):
                kinds = [str(leaf.dtype) for leaf in leaves]
                raise TypeError(
                    f"{_CALL}(*args): argument {self.argnum} must hold floating point tensors, got {kinds}."
                )
            value: object = self.fn(*own)
            if not is_a(value, Tensor) or not value.is_floating_point():
                got = value.dtype if is_a(value, Tensor) else type(value).__name__
                raise TypeError(f"{_CALL}(*args): fn must return a real floating point tensor, got {got}.")
            total = value.sum()
            if has_graph:
                refuse_defects(f"{_CALL}(*args)", total, leaves)
            found = gradients_or_none(total, leaves, create_graph=has_graph, allow_unused=True)
        if missing := [tuple(t.shape) for t, g in zip(leaves, found, strict=True) if g is None]:
            raise ValueError(
                f"{_CALL}(*args): the value does not depend on tensors of shapes {missing} in argument "
                f"{self.argnum}. Compute it from this argument without detach(), or leave them out of it."
            )
        return value if has_graph else value.detach(), structure.fill(zeros_for_none(found, leaves))


class _Compiled:
    """The value and the gradient as one compiled function."""

    def __init__(self, eager: _ValueAndGrad, options: dict[str, Any]) -> None:
        self.eager = eager
        self.compiler = Compiler("value_and_grad(fn, compile)", options)
        self.compared: Counter[object] = Counter()

    def __call__(self, *args: Tree) -> tuple[Tensor, Tree]:
        """Return the value and the gradient."""
        if torch.compiler.is_compiling():
            return self.eager(*args)
        key = torch.is_grad_enabled(), *map(_kind, tree_flatten(args)[0])
        if self.compiler.reason is not None or self.compared[key] >= _COMPARED:
            return self.compiler.attempt(lambda: self._run(args), lambda: self.eager(*args))
        self.compared[key] += 1
        reached = ReachableObjects(self.eager.fn)
        read = [tensor for _, tensor in reached.tensors if tensor.requires_grad]
        versions, drawn = list(map(buffer_versions, reached.modules)), torch.get_rng_state()
        result = self.eager(*args)
        reason = None
        if not torch.equal(drawn, torch.get_rng_state()):
            reason = "fn draws random numbers"
        elif versions != list(map(buffer_versions, reached.modules)):
            reason = "fn writes buffers of a module"
        elif not all(tensor.is_leaf for tensor in read):
            reason = "fn reads a computed tensor that requires grad. Pass it as an argument"
        self.compiler.attempt(lambda: self._compare(args, read), lambda: None, reason)
        self.compiler.reason = self.compiler.reason or reason
        return result

    def _run(self, args: Sequence[Tree]) -> tuple[Tensor, Tree]:
        return self.compiler.of(_traced)(self.eager.fn, self.eager.argnum, args)

    def _compare(self, args: Sequence[Tree], read: Sequence[Tensor]) -> None:
        """Raise ``ArithmeticError`` if compiled results or their derivatives differ from eager ones."""
        random, own = RandomState(), tree_map(fresh_leaf, args)
        outputs, compiled = dissect(self.eager(*own))[0], dissect(self._run(own))[0]
        leaves = [leaf for leaf in (*dissect(own)[0], *read) if leaf.requires_grad]
        pairs = [*zip(outputs, compiled, strict=True)]
        pairs += zip(_pulled(outputs, leaves), _pulled(compiled, leaves), strict=True)
        random.restore()
        for expected, found in pairs:
            expected, found = expected.detach(), found.detach()
            largest = float(expected.abs().nan_to_num(0.0, 0.0, 0.0).max()) if expected.numel() else 0.0
            error = torch.finfo(expected.dtype).eps ** 0.5 * largest
            if not torch.allclose(found, expected, rtol=0.0, atol=error, equal_nan=True):
                share = float((found - expected).abs().max()) / max(largest, 1e-300)
                raise ArithmeticError(f"its results differ from eager ones by {share:.1g} of the largest")


def _traced(fn: Callable[..., Tensor], argnum: int, args: Sequence[Tree]) -> tuple[Tensor, Tree]:
    """Return the value and the gradient, by transforms that ``torch.compile`` supports."""

    def total(own: Tree) -> tuple[Tensor, Tensor]:
        value = fn(*args[:argnum], own, *args[argnum + 1 :])
        return value.sum(), value

    gradient, value = torch.func.grad(total, has_aux=True)(args[argnum])
    return value, gradient


def _kind(leaf: object) -> object:
    """Return what torch compiles new code for if it changes: a shape, a dtype, or a number that is no float."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return leaf if type(leaf) in (bool, int, str) else type(leaf)


def _variable(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not is_differentiable(leaf):
        return leaf
    return leaf.view_as(leaf) if leaf.requires_grad else as_variable(leaf, leaf)


def _pulled(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Multiply fixed random cotangents by the transposed Jacobian of outputs."""
    ends = [output for output in outputs if output.requires_grad]
    if not ends or not leaves:
        return []
    generator = torch.Generator(ends[0].device).manual_seed(0)
    cotangents = [torch.empty_like(end).normal_(generator=generator) for end in ends]
    found = torch.autograd.grad(ends, leaves, cotangents, allow_unused=True)
    return zeros_for_none(found, leaves)
