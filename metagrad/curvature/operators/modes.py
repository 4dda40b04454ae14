"""How the products of a Hessian are computed: from a graph, forward over reverse, block by block, by differences."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.autograd.derivatives.hvp import hvp
from metagrad.autograd.derivatives.linearize import Linearization
from metagrad.curvature.operators.nonsmooth_points import Pieces
from metagrad.curvature.operators.objective import Objective
from metagrad.curvature.operators.space import ParameterSpace

Mode = Literal["auto", "reverse", "forward", "block", "finite_difference"]


class Choice:
    """The mode in use, and those that are left if it fails; shared by batches, so that they fall back once.

    Args:
        call: How errors and warnings name the caller.
        modes: In the order in which they are tried.
    """

    def __init__(self, call: str, modes: Sequence[Mode]) -> None:
        self.call = call
        self.modes = list(modes)
        self._reasons: list[str] = []

    @property
    def mode(self) -> Mode:
        """The mode in use."""
        return self.modes[0]

    def reject(self, error: MissingDerivative) -> None:
        """Go on to the next mode; raise if there is none."""
        self._reasons.append(f"{self.mode} failed: {error}")
        if len(self.modes) == 1:
            if len(self._reasons) == 1:
                raise error
            raise MissingDerivative(f"{self.call}: no mode works. " + " ".join(self._reasons)) from error
        del self.modes[0]

    def settle(self) -> None:
        """Say once which mode is used, if it is not the first."""
        if self._reasons:
            reasons, self._reasons = " ".join(self._reasons), []
            warnings.warn(f'{self.call}: going on with mode="{self.mode}". {reasons}', stacklevel=2)


class Reverse:
    """Products from the graph of a gradient, which is kept."""

    def __init__(self, lin: Linearization, space: ParameterSpace, chunk: int) -> None:
        self.lin = lin
        self.space = space
        self.chunk = chunk

    def products(self, vectors: Tensor) -> Tensor:
        """Multiply rows ``[k, n]``."""
        return self.block_products(self.space, vectors)

    def block_products(self, block: ParameterSpace, vectors: Tensor) -> Tensor:
        """Multiply rows of a diagonal block: the backward passes go no further than that."""
        names = self.space.names
        only = [names.index(name) for name in block.names]
        on_tape = self.lin.create_graph and torch.is_grad_enabled()
        pieces = self.lin.pieces(block.split(vectors), chunk=self.chunk, create_graph=on_tape, only=only)
        if on_tape:
            return torch.cat([block.join(parts) for _, parts in pieces])
        products = torch.empty_like(vectors)
        for place, parts in pieces:
            for part, columns in zip(parts, block.slices.values(), strict=True):
                products[place, columns] = part.reshape(len(part), -1)
        return products

    def close(self) -> None:
        """Free the graph."""
        self.lin.close()


class Forward:
    """Products by ``torch.func.jvp`` of ``torch.func.grad``, each from the loss."""

    def __init__(self, objective: Objective, space: ParameterSpace, create_graph: bool) -> None:
        self.objective = objective
        self.space = space
        self.create_graph = create_graph

    def products(self, vectors: Tensor) -> Tensor:
        """Multiply rows ``[k, n]``."""
        return torch.stack([self._product(row) for row in vectors])

    def _product(self, vector: Tensor) -> Tensor:
        objective, space = self.objective, self.space
        on_tape = self.create_graph and torch.is_grad_enabled()

        def loss_at(coordinates: list[Tensor]) -> Tensor:
            return objective.at(space, coordinates)

        try:
            with torch.set_grad_enabled(on_tape):
                point, direction = objective.point(space), space.split(vector)
                found = hvp(loss_at, point, direction, mode="forward", create_graph=on_tape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The loss has run once as it is, so what stops it is the transform.
            what = str(error).splitlines()[0]
            raise MissingDerivative(f"torch.func does not run this loss: {what}") from error
        return space.join(found.product)

    def close(self) -> None:
        """Nothing is held."""


class Blockwise:
    """Products that hold the graph of one block of a :func:`metagrad.autograd.chain` at a time."""

    def __init__(self, objective: Objective, space: ParameterSpace, create_graph: bool) -> None:
        self.objective = objective
        self.space = space
        self.create_graph = create_graph

    def products(self, vectors: Tensor) -> Tensor:
        """Multiply rows ``[k, n]``."""
        return torch.stack([self._product(row) for row in vectors])

    def _product(self, vector: Tensor) -> Tensor:
        objective, directions = self.objective, self.space.unflatten(vector)
        on_tape = self.create_graph and torch.is_grad_enabled()
        try:
            with objective.surroundings():
                found = hvp(
                    objective.loss_fn, objective.params, directions, *objective.args, mode="block",
                    create_graph=on_tape,
                )  # fmt: skip
        except ValueError as error:
            raise MissingDerivative(str(error)) from error
        return self.space.join(list(found.product.values()))

    def close(self) -> None:
        """Nothing is held."""


class FiniteDifference:
    r"""Products by central differences of gradients, :math:`(g(\theta + h v) - g(\theta - h v)) / 2h`.

    The step has a length of about the cube root of the rounding unit, relative to the parameters along the vector,
    which balances rounding and truncation errors.

    References:
        Dennis, Schnabel, "Numerical Methods for Unconstrained Optimization and Nonlinear Equations", section 5.6.
    """

    def __init__(
        self, objective: Objective, space: ParameterSpace, step: float | None, allow_kinks: bool
    ) -> None:
        self.objective = objective
        self.space = space
        self.step = torch.finfo(space.dtype).eps ** (1 / 3) if step is None else step
        self.point = space.join([c.detach() for c in objective.point(space)])
        self.pieces: Pieces | None = None
        if not allow_kinks:
            self.pieces = self._evaluated(self.point)[2]
            if self.pieces.opaque:
                names = ", ".join(sorted(self.pieces.opaque))
                raise ValueError(_kinks(f"{names} may have kinks that cannot be seen"))

    def products(self, vectors: Tensor) -> Tensor:
        """Multiply rows ``[k, n]``."""
        return torch.stack([self._product(row.detach()) for row in vectors])

    def _product(self, vector: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(vector)
        if not float(norm):
            return torch.zeros_like(vector)
        unit = vector / norm
        h = self.step * (1 + (self.point @ unit).abs())
        ahead, behind = self._gradient(self.point + h * unit), self._gradient(self.point - h * unit)
        return (ahead - behind) * (norm / (2 * h))

    def _gradient(self, point: Tensor) -> Tensor:
        coordinates, loss, pieces = self._evaluated(point)
        if self.pieces is not None:
            _refuse_crossing(self.pieces.crossings(pieces), self.step)
        found = torch.autograd.grad(loss, coordinates, torch.ones_like(loss), allow_unused=True)
        parts = [torch.zeros_like(c) if f is None else f for f, c in zip(found, coordinates, strict=True)]
        return self.space.join(parts)

    def _evaluated(self, point: Tensor) -> tuple[list[Tensor], Tensor, Pieces]:
        coordinates = [part.detach().requires_grad_() for part in self.space.split(point)]
        with torch.enable_grad(), Pieces() as pieces:
            loss = self.objective.at(self.space, coordinates)
        return coordinates, loss, pieces

    def close(self) -> None:
        """Nothing is held."""


Multiplier: TypeAlias = Reverse | Forward | Blockwise | FiniteDifference


def _refuse_crossing(crossed: int | None, step: float) -> None:
    if crossed is None:
        raise ValueError(_kinks("the loss takes another path of operations there"))
    if crossed:
        raise ValueError(_kinks(f"the step of length {step:.1e} crosses {crossed} kinks"))


def _kinks(what: str) -> str:
    return (
        f'hessian(..., mode="finite_difference"): {what} (of ReLU, max pooling, abs or the like), where the gradient '
        'jumps and a difference is no derivative. Take mode="reverse", a smaller step=, or allow_kinks=True.'
    )
