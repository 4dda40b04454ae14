"""Operators made of others: sums, scalings, the identity, and diagonal blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from metagrad.curvature.operators.operator import Operator
from metagrad.curvature.operators.space import ParameterSpace


class Sum(Operator):
    """A sum of operators on the same parameters."""

    def __init__(self, terms: Sequence[Operator]) -> None:
        super().__init__(terms[0].space)
        self.terms = tuple(terms)

    def _products(self, vectors: Tensor) -> Tensor:
        total = self.terms[0].products(vectors)
        for term in self.terms[1:]:
            total = total + term.products(vectors)
        return total

    def _free(self) -> None:
        for term in self.terms:
            term.close()


class Scaled(Operator):
    """An operator times a number, which may require grad."""

    def __init__(self, operator: Operator, factor: float | Tensor) -> None:
        super().__init__(operator.space)
        self.operator = operator
        self.factor = factor

    def _products(self, vectors: Tensor) -> Tensor:
        return self.operator.products(vectors) * self.factor

    def _free(self) -> None:
        self.operator.close()


class Identity(Operator):
    """The identity on some parameters.

    Example:
        >>> space = metagrad.curvature.ParameterSpace({"w": torch.zeros(2)})
        >>> (0.5 * metagrad.curvature.Identity(space)).to_dense()
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """

    def _products(self, vectors: Tensor) -> Tensor:
        return vectors.clone()


class Block(Operator):
    """A diagonal block of an operator."""

    def __init__(self, operator: Operator, space: ParameterSpace) -> None:
        super().__init__(space)
        self.operator = operator

    def _products(self, vectors: Tensor) -> Tensor:
        return self.operator._block_products(self.space, vectors)

    def _free(self) -> None:
        self.operator.close()


def add(left: Operator, right: Operator) -> Sum:
    """Add two operators; sums of sums are flat.

    Raises:
        ValueError: They are on different parameters.
    """
    if not left.space.is_same(right.space):
        raise ValueError(
            f"A + B: A and B must be on the same parameters, got {left.space} and {right.space}."
        )
    terms = [term for part in (left, right) for term in (part.terms if isinstance(part, Sum) else (part,))]
    return Sum(terms)


def scale(operator: Operator, factor: float | Tensor) -> Scaled:
    """Multiply an operator with a number.

    Raises:
        ValueError: The factor is a tensor of several elements.
    """
    if isinstance(factor, Tensor) and factor.numel() != 1:
        raise ValueError(f"c * H: c must be one number, got a tensor of shape {tuple(factor.shape)}.")
    return Scaled(operator, factor.reshape(()) if isinstance(factor, Tensor) else factor)
