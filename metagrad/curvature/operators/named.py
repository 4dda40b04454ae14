"""Estimates of vectors, by the names of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.operators.space import ParameterSpace
from metagrad.sparse.matrix.tensor import SparseTensor

Named: TypeAlias = "dict[str, Tensor | SparseTensor]"


@dataclass(frozen=True, eq=False, repr=False)
class NamedEstimate:
    """An :class:`Estimate` of a vector whose value, standard error and interval are dicts of the parameters.

    Attributes:
        flat: The estimate of the flat vector, ``[n]``.
        space: The parameters.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with metagrad.curvature.hessian((w**3).sum(), {"w": w}) as H:
        ...     H.diagonal(probes=2).value
        {'w': tensor([ 6., 12.])}
    """

    flat: Estimate
    space: ParameterSpace

    @property
    def value(self) -> Named:
        """The estimate."""
        return self.space.unflatten(self.flat.value)

    @property
    def stderr(self) -> Named:
        """Its standard error."""
        return self.space.unflatten(self.flat.stderr)

    def interval(self, level: float = 0.95) -> tuple[Named, Named]:
        """Return the ends of the intervals that cover each true value with probability ``level``."""
        low, high = self.flat.interval(level)
        return self.space.unflatten(low), self.space.unflatten(high)

    @property
    def samples(self) -> int:
        """How many samples the standard error is from."""
        return self.flat.samples

    @property
    def matvecs(self) -> int:
        """How many products were spent."""
        return self.flat.matvecs

    @property
    def method(self) -> str:
        """The method, by name."""
        return self.flat.method

    @property
    def converged(self) -> bool:
        """False where ``rtol`` was asked for and not reached."""
        return self.flat.converged

    def __repr__(self) -> str:
        return repr(self.flat)
