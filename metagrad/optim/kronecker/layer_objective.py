"""The loss of a model, with the Kronecker factors of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from metagrad.core.substitution import replaced
from metagrad.curvature.likelihoods.recognition import evaluate
from metagrad.optim.curvature import Kronecker
from metagrad.optim.kronecker.factors import Factors
from metagrad.optim.kronecker.layer_calls import LayerCalls, observed
from metagrad.optim.objective import LossFunction, TapeObjective
from metagrad.optim.probes import Generators, torchs_own
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import WeightedLoss


class LayerObjective(TapeObjective):
    r"""The loss of a model on a batch, with gradient, curvature, and the Kronecker factors of its layers.

    .. math::
        L(\theta) = \ell(f_\theta(x), y), \qquad
        A = \mathbb{E}[a a^\top], \quad G = \mathbb{E}[g g^\top]

    with :math:`a` the inputs of a layer and :math:`g` the gradients of its outputs. The model is evaluated once, and
    is left as it was. It may be called with other values of its parameters, so that a step of an inner loop can make
    an objective of its own, and everything can be differentiated at every order.

    What does not work: layers that are shared, called twice or not at all, grouped convolutions, and calls inside
    transforms of torch.func or checkpoints, which are refused by name; ``torch.compile``. So
    ``metagrad.unroll(compile=True)`` runs the steps uncompiled; it refuses a model whose own parameters require
    grad, because they are not among its arguments.

    Args:
        model: The model :math:`f`.
        loss_fn: The loss :math:`\ell`, a scalar. If it ends in a function of torch such as ``F.cross_entropy``,
            its form is known, and labels can be drawn.
        x: Inputs of the model.
        y: Targets.
        params: Parameters by name, some or all, at which the loss is taken; they must require grad. None takes those
            of the model.
        create_graph: Put gradient, products and factors on the tape.
        generators: Where random numbers come from.

    Raises:
        ValueError: A layer is grouped, or shares a parameter, or is called twice; or the loss is complex.

    Example:
        Of a linear model with half of the mean squared error, one step of K-FAC solves the regression, if the Fisher
        matrix is that of two residuals whose squares have the mean 1:

        >>> from metagrad.optim.kronecker.layer_objective import LayerObjective
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.tensor([[1.0], [-1.0]])
        >>> objective = LayerObjective(model, lambda z, y: (z - y).square().mean() / 2, x, y)
        >>> rule = metagrad.optim.rules.kfac(lr=1.0, momentum=0.0, damping=1e-12, kl_clip=None)
        >>> params = dict(model.named_parameters())
        >>> new, state = rule.update(objective.grads, rule.init(params), params, objective)
        >>> new["weight"].round(decimals=3).tolist()
        [[1.0, -1.0]]

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015.
    """

    _calls: LayerCalls
    _total: Tensor  # with its graph, whatever create_graph is

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        x: Tensor,
        y: Tensor,
        params: Params | None = None,
        *,
        create_graph: bool = False,
        generators: Generators = torchs_own,
    ) -> None:
        if params is None:
            params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        evaluated: list[Tensor] = []  # the loss at params, on the tape

        def loss(values: Params) -> tuple[Tensor, Sequence[WeightedLoss]]:
            by_id = {id(p): values[name] for name, p in model.named_parameters() if name in values}
            with replaced(model, by_id):
                value, known = evaluate(loss_fn, model(x), y)
            if not evaluated:
                evaluated.append(value)
            return value, () if known is None else [WeightedLoss(known, value.new_ones(()))]

        with observed(model, tuple(params)) as self._calls:
            super().__init__(loss, params, create_graph=create_graph, generators=generators)
        (self._total,) = evaluated

    @classmethod
    def observing(
        cls,
        calls: LayerCalls,
        loss: LossFunction,
        params: Params,
        value: Tensor,
        grads: Params,
        *,
        losses: Sequence[WeightedLoss] | Callable[[], Sequence[WeightedLoss]] = (),
        create_graph: bool = False,
    ) -> LayerObjective:
        """Make the objective of a loss that was evaluated before, while its calls were observed.

        As for :meth:`TapeObjective.known`; of stacked tasks, the value is ``[tasks]``.
        """
        objective = cls.known(loss, params, value, grads, losses=losses, create_graph=create_graph)
        assert isinstance(objective, cls)
        objective._calls, objective._total = calls, value
        return objective

    def kronecker_factors(self, request: Kronecker) -> dict[str, Factors]:
        """Return the factors of the layers, by the names of their weights, at the cost of one backward pass."""
        if request.fisher == "empirical":
            outputs = [self._total]
            cotangents = [torch.ones_like(self._total)]
        else:
            losses = self._known_losses()
            outputs = [loss.output for loss, _ in losses]
            cotangents = [
                w.abs().sqrt() * loss.score(self._generators(loss.output.device)) for loss, w in losses
            ]
        if not self._create_graph:
            cotangents = [cotangent.detach() for cotangent in cotangents]
        return self._calls.factors(
            self._params,
            outputs,
            cotangents,
            stacked=self._total.ndim > 0,
            request=request,
            create_graph=self._create_graph,
        )
