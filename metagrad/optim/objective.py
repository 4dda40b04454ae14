"""Losses that rules can evaluate at other parameters, for line searches, trust regions and damping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.derivatives.grad import refuse_complex
from metagrad.autograd.derivatives.quick import QuickDerivatives
from metagrad.optim.curvature import Curvature
from metagrad.optim.probes import Generators, torchs_own
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import TapeCurvature, WeightedLoss

LossFunction: TypeAlias = "Callable[[Params], Tensor | tuple[Tensor, Sequence[WeightedLoss]]]"
"""Parameters to the loss ``[]``, or the losses ``[tasks]``; with the parts of known form that it consists of."""


class Objective(Curvature, Protocol):
    """A :class:`~metagrad.optim.curvature.Curvature` that can evaluate the loss, also at other parameters."""

    value: Tensor
    """The loss at the parameters of the step, ``[]``, or ``[tasks]``."""

    def fisher_products(self, v: Params) -> Params:
        """Return the Fisher matrix times ``v``."""
        ...

    def evaluate(self, params: Params) -> Tensor:
        """Return the loss at other parameters, a constant."""
        ...

    def gradient(self, params: Params) -> tuple[Tensor, Params]:
        """Return the loss and its gradient at other parameters; on the tape if the parameters and this are."""
        ...


class TapeObjective(TapeCurvature):
    r"""A loss with its gradient and curvature at given parameters, from the tape, and its values at any others.

    Args:
        loss: Called with parameters by name; deterministic. It returns the loss ``[]``, or losses ``[tasks]`` of
            stacked parameters. For the Gauss-Newton and the Fisher matrix it returns, beside it, the parts of known
            form that the loss consists of.
        params: Where the step begins; they must require grad.
        create_graph: Put gradient and products on the tape.
        generators: Where random numbers come from.

    Raises:
        ValueError: The loss is complex.

    Attributes:
        value: The loss at ``params``.
        grads: Its gradient; of stacked parameters, that of each task's own loss.

    Example:
        >>> from metagrad.optim.objective import TapeObjective
        >>> params = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
        >>> objective = TapeObjective(lambda p: (p["w"] ** 3).sum(), params)
        >>> objective.products({"w": torch.ones(2)}), objective.evaluate({"w": torch.zeros(2)})
        ({'w': tensor([ 6., 12.])}, tensor(0.))
    """

    def __init__(
        self,
        loss: LossFunction,
        params: Params,
        *,
        create_graph: bool = False,
        generators: Generators = torchs_own,
    ) -> None:
        with torch.enable_grad():
            with QuickDerivatives():
                value, losses = self._with_parts(loss(params))
            grads = _gradients(value, params, create_graph=True)
        self._begin(loss, params, value, grads, losses, create_graph, generators)

    @classmethod
    def known(
        cls,
        loss: LossFunction,
        params: Params,
        value: Tensor,
        grads: Params,
        *,
        losses: Sequence[WeightedLoss] | Callable[[], Sequence[WeightedLoss]] = (),
        create_graph: bool = False,
    ) -> TapeObjective:
        """Make the objective of a loss whose value and gradient were computed before, with their graphs."""
        objective = cls.__new__(cls)
        objective._begin(loss, params, value, grads, losses, create_graph, torchs_own)
        return objective

    def _begin(
        self,
        loss: LossFunction,
        params: Params,
        value: Tensor,
        grads: Params,
        losses: Sequence[WeightedLoss] | Callable[[], Sequence[WeightedLoss]],
        create_graph: bool,
        generators: Generators,
    ) -> None:
        super().__init__(params, grads, losses=losses, create_graph=create_graph, generators=generators)
        self._loss = loss
        self.value: Tensor = value if create_graph else value.detach()
        self.grads: Params = grads if create_graph else {key: g.detach() for key, g in grads.items()}

    def fisher_products(self, v: Params) -> Params:
        r"""Multiply :math:`\sum_i |w_i| J_i^\top F_{L_i} J_i` with ``v``."""
        return fisher_products(self, v)

    def evaluate(self, params: Params) -> Tensor:
        """Return the loss at other parameters, a constant."""
        with torch.no_grad():
            return self._with_parts(self._loss(params))[0]

    def gradient(self, params: Params) -> tuple[Tensor, Params]:
        """Return the loss and its gradient at other parameters; on the tape with ``create_graph``."""
        on_tape = self._create_graph and torch.is_grad_enabled()
        variables = {
            key: p if on_tape and p.requires_grad else p.detach().requires_grad_()
            for key, p in params.items()
        }
        with torch.enable_grad():
            value = self._with_parts(self._loss(variables))[0]
            grads = _gradients(value, variables, create_graph=on_tape)
        return (value, grads) if on_tape else (value.detach(), grads)

    def _with_parts(
        self, result: Tensor | tuple[Tensor, Sequence[WeightedLoss]]
    ) -> tuple[Tensor, Sequence[WeightedLoss]]:
        value, parts = (result, ()) if isinstance(result, Tensor) else result
        refuse_complex(f"{type(self).__name__}(...)", value)
        return value, parts


def fisher_products(curvature: TapeCurvature, v: Params) -> Params:
    """Multiply the Fisher matrix of the losses that a curvature consists of."""
    total = {key: torch.zeros_like(p) for key, p in curvature._params.items()}
    for loss, weight in curvature._known_losses():
        # A likelihood has the same Fisher matrix where its logarithm is maximized.
        pushed = weight.abs() * loss.fisher_product(curvature._pushed_forward(loss.output, v))
        part = curvature._pulled_back([loss.output], [pushed])
        total = {key: total[key] + part[key] for key in total}
    return total


def _gradients(value: Tensor, params: Params, *, create_graph: bool) -> Params:
    """Differentiate the sum over tasks; what the loss does not use has a gradient of zero."""
    found = torch.autograd.grad(
        value, list(params.values()), torch.ones_like(value), create_graph=create_graph, allow_unused=True
    )
    return {
        key: torch.zeros_like(p) if g is None else g
        for (key, p), g in zip(params.items(), found, strict=True)
    }
