"""Check derivatives of any order by finite differences of the next lower derivative."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from metagrad.core._torch import linalg
from metagrad.core.checks import check_count, is_list_or_tuple
from metagrad.core.tree import Tree, is_differentiable, leaf_names, tree_flatten, tree_leaves, tree_unflatten

Scalar = Callable[[Sequence[Tensor]], Tensor]


class WrongDerivative(GradcheckError):  # noqa: N818 - it reads as what it says
    """A derivative that finite differences contradict.

    Attributes:
        order: The order of the derivative.
        got: The derivative along a random direction.
        expected: The finite difference along the same direction.
    """

    def __init__(self, name: str, order: int, got: float, expected: float) -> None:
        super().__init__(
            f"gradcheck(fn, inputs): the derivative of order {order} with respect to {name} is wrong: along a random "
            f"direction it is {got:.10g}, finite differences give {expected:.10g}. {_hint(order)}"
        )
        self.order: int = order
        self.got: float = got
        self.expected: float = expected


def gradcheck(
    fn: Callable[..., Tree],
    inputs: Sequence[Tree] | Tree,
    *,
    order: int = 3,
    eps: float | Sequence[float] = 1e-4,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    directions: int = 2,
    seed: int = 0,
) -> bool:
    r"""Check every derivative of ``fn`` up to an order, by finite differences, in all mixed orders.

    With :math:`L_0 = \varphi_0(f(x))`, and :math:`L_k = \varphi_k(\nabla L_{k-1}) + L_{k-1}`, each
    :math:`\nabla L_k` is compared with fourth-order central differences of :math:`L_k` along random
    directions in each input. Each :math:`\varphi` is a random *nonlinear* function that reduces all of its
    tensors to a scalar. A linear function would miss a gradient whose own graph is detached. Reducing all tensors
    together makes the orders mixed. A gradient that does not require grad must be constant, which is also checked.
    :func:`torch.autograd.gradgradcheck` skips such gradients.

    Args:
        fn: A smooth deterministic function of ``inputs`` that returns a pytree of tensors.
        inputs: A pytree, or a list or tuple of pytrees of tensors for ``fn(*inputs)``. Float64 leaves that require
            grad are checked.
        order: The highest derivative, 1 or more.
        eps: The finite-difference step. With several steps, at least one must agree, since a ReLU is smooth within a
            small enough step.
        rtol: Tolerance relative to the size of the derivative.
        atol: Absolute tolerance.
        directions: Number of random directions for each input, 1 or more.
        seed: Seed of the contractions and the directions.

    Returns:
        True.

    Raises:
        GradcheckError: A derivative is incorrect or detached. The message names the input and the order.
        ValueError: No input requires grad, or an input that requires grad is not float64. ``fn`` returns no floating
            point tensor. ``order`` or ``directions`` is not an int of 1 or more.

    Example:
        >>> x = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)
        >>> metagrad.gradcheck(torch.sin, x, order=3)
        True

    References:
        Nested finite differences of the gradient of the gradient: Maclaurin, Duvenaud, Adams, "Autograd",
        AutoML workshop 2015 (``check_grads``).
    """
    trees = tuple(inputs) if is_list_or_tuple(inputs) else (inputs,)
    leaves, spec = tree_flatten(trees)
    names = leaf_names(trees, "inputs")
    checked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    _check_arguments(leaves, names, checked, order=order, directions=directions)
    points = [leaves[i].detach() for i in checked]

    def outputs_at(values: Sequence[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for index, value in zip(checked, values, strict=True):
            filled[index] = value
        results = tree_leaves(fn(*tree_unflatten(filled, spec)))
        found = [r for r in results if isinstance(r, Tensor) and is_differentiable(r)]
        if not found:
            raise ValueError(
                "gradcheck(fn, inputs): fn returns no floating point tensor, so there is no derivative to check. It "
                "must return a tree of tensors, such as a tensor or a dict, and no .item()."
            )
        return [torch.view_as_real(r) if r.is_complex() else r for r in found]

    generator = torch.Generator(device="cpu").manual_seed(seed)
    steps = tuple(eps) if isinstance(eps, Sequence) else (eps,)
    comparison = _Comparison([names[i] for i in checked], steps, rtol, atol, directions, generator)
    with torch.enable_grad():
        level = _contracted(outputs_at, points, generator)
        comparison.check(level, points, 1)
        for k in range(2, order + 1):
            level = _sum(level, _contracted(_gradient_of(level), points, generator))
            comparison.check(level, points, k)
    return True


def _check_arguments(leaves: Sequence[Any], names: list[str], checked: list[int], **counts: object) -> None:
    for name, count in counts.items():
        check_count(f"gradcheck(..., {name})", count)
    if not checked:
        raise ValueError("gradcheck(fn, inputs): no input requires grad; call .requires_grad_() on some.")
    for i in checked:
        if leaves[i].dtype != torch.float64:
            raise ValueError(
                f"gradcheck(fn, inputs): {names[i]} must be float64 for finite differences to mean anything, "
                f"got {leaves[i].dtype}. Use {names[i]}.double()."
            )


def _contracted(
    fn: Callable[[Sequence[Tensor]], list[Tensor]], points: list[Tensor], generator: torch.Generator
) -> Scalar:
    """Reduce the outputs of ``fn`` to a scalar by a random quadratic function with values of order one."""
    samples = [value.detach() for value in fn(_leaves(points))]
    weights = [torch.randn(s.shape, generator=generator, dtype=torch.float64).to(s) for s in samples]
    scales = [1.0 + float(s.abs().max()) if s.numel() else 1.0 for s in samples]

    def contraction(values: Sequence[Tensor]) -> Tensor:
        total = values[0].new_zeros(())
        for output, weight, scale in zip(fn(values), weights, scales, strict=True):
            unit = output / scale
            total = total + (weight * (unit + unit**2 / 2)).sum()
        return total

    return contraction


def _gradient_of(scalar: Scalar) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    return lambda values: _gradient(scalar(values), values, create_graph=True)


def _gradient(loss: Tensor, values: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(v) for v in values]
    return list(torch.autograd.grad(loss, list(values), create_graph=create_graph, materialize_grads=True))


def _sum(first: Scalar, second: Scalar) -> Scalar:
    return lambda values: first(values) + second(values)


def _leaves(points: Sequence[Tensor]) -> list[Tensor]:
    return [point.detach().clone().requires_grad_() for point in points]


@dataclass
class _Comparison:
    """Compares a gradient with finite differences, input by input."""

    names: list[str]
    steps: Sequence[float]
    rtol: float
    atol: float
    directions: int
    generator: torch.Generator

    def check(self, scalar: Scalar, points: list[Tensor], order: int) -> None:
        """Check the gradient of ``scalar``, which contracts all derivatives below ``order``."""
        values = _leaves(points)
        gradients = _gradient(scalar(values), values)
        for index, name in enumerate(self.names):
            for _ in range(self.directions):
                direction = self._direction(points[index])
                got = float((gradients[index].detach() * direction).sum())
                size = float(linalg.vector_norm(gradients[index].detach()))
                expected = math.nan
                for h in self.steps:
                    expected = self._difference(scalar, points, index, direction, h)
                    if abs(got - expected) <= self.atol + self.rtol * max(abs(expected), size):
                        break
                else:
                    raise WrongDerivative(name, order, got, expected)

    def _direction(self, point: Tensor) -> Tensor:
        direction = torch.randn(point.shape, generator=self.generator, dtype=torch.float64).to(point)
        return direction / linalg.vector_norm(direction).clamp_min(1e-300)

    def _difference(
        self, scalar: Scalar, points: list[Tensor], index: int, direction: Tensor, h: float
    ) -> float:
        def at(step: float) -> float:
            moved = _leaves(points)
            moved[index] = (points[index] + step * direction).requires_grad_()
            return float(scalar(moved).detach())

        return (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)


def _hint(order: int) -> str:
    if order == 1:
        return "The backward of fn itself is wrong."
    return (
        f"The gradient of order {order - 1} returned by autograd does not carry its whole graph: some backward "
        "inside fn detaches, or its derivative is wrong."
    )
