"""What rules may ask of the second derivatives of a loss.

A rule that uses curvature has ``needs_curvature(step)``, so that nothing is computed at the steps between two
estimates, and is given a :class:`Curvature` as ``update(grads, state, params, curvature)``. Where tasks are stacked,
the loss is their sum and its Hessian is block-diagonal over tasks: one product serves all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from metagrad.optim.rule import Params, RuleNode


class Diagonal(NamedTuple):
    """Which estimate of a diagonal a rule works with.

    Attributes:
        matrix: ``"hessian"``, by Hutchinson's probes, or ``"gauss_newton"``, by labels drawn from the model.
        samples: How many probes, or draws of the labels, are averaged.
        distribution: Of the elements of a probe: ``"rademacher"`` signs, or ``"normal"`` numbers.
    """

    matrix: Literal["hessian", "gauss_newton"]
    samples: int = 1
    distribution: Literal["rademacher", "normal"] = "rademacher"


class Kronecker(NamedTuple):
    """A request for the Kronecker factors of layers: of which Fisher matrix they are.

    Attributes:
        fisher: That of the labels in the data, ``"empirical"``, or of labels drawn from the model, ``"sampled"``.
        loss_reduction: Whether the loss is the ``"mean"`` over examples or their ``"sum"``, which ``"empirical"``
            cannot see.
    """

    fisher: Literal["empirical", "sampled"]
    loss_reduction: Literal["mean", "sum"] = "mean"

    def weight(self, num_examples: int) -> int:
        """Return the factor that makes a sum of squared gradients over examples their average."""
        return num_examples if self.power == 2 else 1

    @property
    def power(self) -> int:
        """How often the number of examples divides a squared gradient."""
        if self.loss_reduction == "sum":
            return 0
        return 2 if self.fisher == "empirical" else 1


class Curvature(Protocol):
    """Second derivatives of the loss of one step, at its parameters."""

    def products(self, v: Params) -> Params:
        """Return the Hessian times ``v``."""
        ...

    def gauss_newton_products(self, v: Params) -> Params:
        """Return the Gauss-Newton matrix times ``v``."""
        ...

    def diagonal(self, request: Diagonal) -> Params:
        """Return an estimate of a diagonal, without the parameters for which none was made at this step."""
        ...


class LayerCurvature(Curvature, Protocol):
    """A curvature that has the Kronecker factors of the layers of a model."""

    def kronecker_factors(self, request: Kronecker) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return the factors of inputs and of outputs of each layer, ``[*tasks, n, n]``, by the name of its weight.

        If a bias is adapted, the last input is the 1 that it is multiplied with. A layer that had no part in the
        loss is missing.
        """
        ...


class CurvatureRule(Protocol):
    """What a rule that uses curvature has beside ``init`` and ``update``.

    One that asks for Kronecker factors has ``needs_layers`` as well, since layers are observed as the loss is
    evaluated.
    """

    def needs_curvature(self, step: int) -> bool:
        """Say whether the step uses curvature; the first is 0."""
        ...


def needs_curvature(rule: object, step: int) -> bool:
    """Say whether a rule, or a rule that it is made of, uses curvature at a step.

    Args:
        rule: Any rule or transform; one without a method ``needs_curvature(step)`` asks the rules that it
            is made of.
        step: How many steps were taken before.

    Example:
        >>> from metagrad.optim.curvature import needs_curvature
        >>> from metagrad.optim.diagonal.sophia import sophia_h
        >>> [needs_curvature(sophia_h(curvature_every=2), step) for step in range(4)]
        [True, False, True, False]
    """
    return _asks("needs_curvature", rule, step)


def needs_layers(rule: object, step: int) -> bool:
    """Say whether a rule, or a rule that it is made of, uses Kronecker factors of layers at a step.

    Args:
        rule: Any rule or transform; one without a method ``needs_layers(step)`` asks the rules that it
            is made of.
        step: How many steps were taken before.

    Example:
        >>> from metagrad.optim.curvature import needs_layers
        >>> rules = metagrad.optim.rules
        >>> [needs_layers(rules.kfac(curvature_every=2, inverse_every=2), step) for step in range(3)]
        [True, False, True]
        >>> needs_layers(rules.sophia_h(), 0)
        False
    """
    return _asks("needs_layers", rule, step)


def _asks(method: str, rule: object, step: int) -> bool:
    if isinstance(rule, (tuple, list)):
        return any(_asks(method, part, step) for part in rule)
    asks = getattr(rule, method, None)
    if asks is not None:
        return asks(step)
    parts = rule.nested if isinstance(rule, RuleNode) else ()
    return any(_asks(method, getattr(rule, name), step) for name in parts)


class KnownDiagonal:
    """A curvature given by its diagonal, exact or estimated before.

    Args:
        diagonals: By parameter name; they may be missing.

    Example:
        >>> from metagrad.optim.diagonal.adahessian import adahessian
        >>> from metagrad.optim.curvature import KnownDiagonal
        >>> rule = adahessian(lr=1.0, eps=0.0)
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> exact = KnownDiagonal({"w": torch.tensor([1.0, 4.0])})
        >>> rule.update({"w": torch.tensor([1.0, 8.0])}, rule.init(params), params, exact)[0]
        {'w': tensor([0., 0.])}
    """

    def __init__(self, diagonals: Params) -> None:
        self._diagonals = diagonals

    def diagonal(self, request: Diagonal) -> Params:
        """Return what is known, whatever is asked."""
        return self._diagonals

    def products(self, v: Params) -> Params:
        """Refuse: a diagonal is no matrix."""
        raise TypeError("KnownDiagonal.products(v): only the diagonal is known. TapeCurvature multiplies.")

    def gauss_newton_products(self, v: Params) -> Params:
        """Refuse likewise."""
        raise TypeError(
            "KnownDiagonal.gauss_newton_products(v): only the diagonal is known. TapeCurvature multiplies."
        )


def checked_diagonal(
    call: str, curvature: object | None, request: Diagonal, params: Mapping[str, Tensor]
) -> Mapping[str, Tensor | None]:
    """Return the estimate for each parameter, None of those that lack one; refuse to go without."""
    if curvature is None:
        raise ValueError(
            f"{call}.update: this step needs curvature, and got None. In an inner loop it is given; by hand, pass "
            "TapeCurvature(params, grads), with gradients of create_graph=True."
        )
    found = curvature.diagonal(request)  # type: ignore[attr-defined]
    return {key: found.get(key) for key in params}


def checked_factors(
    call: str, curvature: object | None, request: Kronecker
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return the factors of layers; refuse to go without."""
    if curvature is None:
        raise ValueError(
            f"{call}.update: this step needs curvature, and got None. In an inner loop it is given; by hand, pass "
            "LayerObjective(model, loss_fn, x, y)."
        )
    factors = getattr(curvature, "kronecker_factors", None)
    if factors is None:
        raise TypeError(
            f"{call}.update: it needs the Kronecker factors of layers, and {type(curvature).__name__} has no "
            "kronecker_factors(request). Pass LayerObjective(model, loss_fn, x, y)."
        )
    return factors(request)
