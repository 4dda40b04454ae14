"""Natural gradient descent: the gradient in the metric of the Fisher matrix, by conjugate gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY

import torch
from torch import Tensor

from metagrad.curvature.solvers.iteration import divide
from metagrad.optim.newton.damped import Damped
from metagrad.optim.newton.second_order import NewtonStep, StepProblem
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.newton_optimizer import MINIBATCH_OPTIONS, NewtonOptimizer


@functional_optimizer
class NaturalGradientRule(Damped):
    r"""The functional form of natural gradient descent.

    .. math::
        (F_t + \lambda I) \, d_t \approx -g_t, \qquad
        w_t = w_{t-1} + \alpha_t \min\Bigl(\eta, \sqrt{2 \delta / d_t^\top F_t d_t}\Bigr) \, d_t

    with the Fisher matrix :math:`F = \sum_n s_n \, \mathbb{E}_{y \sim p(y | x_n)} \nabla\ell_n \nabla\ell_n^\top`,
    exact, of the likelihood that the loss is the negative logarithm of. For losses that are means, the bound
    :math:`\delta` is one of the Kullback-Leibler divergence of what the model predicts, to second order.

    Damping :math:`\lambda_t` and length :math:`\alpha` follow the loss, as for
    :func:`~metagrad.optim.newton.gauss_newton.gauss_newton`: a Fisher matrix of fewer examples than parameters is
    singular, it vanishes where predictions saturate, and there neither a constant damping nor a bound of the
    divergence keeps a step from climbing.

    With ``curvature_every`` above 1, the steps between two solves multiply with nothing. Their directions are by the
    limited-memory BFGS matrix of pairs :math:`p_i, (F + \lambda I) p_i` that the last solve went through. Their
    bound is one of :math:`d^\top (F + \lambda I) d / 2`, as this matrix knows it.

    Derivatives are those of :func:`~metagrad.optim.newton.newton_cg.newton_cg`.

    Example:
        The logit :math:`w` of a coin that showed heads: :math:`g = p - 1`, :math:`F = p (1 - p)`.

        >>> from types import SimpleNamespace
        >>> from metagrad.optim.newton.natural_gradient import natural_gradient
        >>> coin = SimpleNamespace(fisher_products=lambda v: {"w": 0.25 * v["w"]})
        >>> rule, params = natural_gradient(lr=0.5, damping=0.0, adapt=False), {"w": torch.zeros(1)}
        >>> rule.update({"w": torch.tensor([-0.5])}, rule.init(params), params, coin)[0]
        {'w': tensor([1.])}

    References:
        Amari, "Natural gradient works efficiently in learning", Neural Computation 10(2), 1998; Martens, "New
        insights and perspectives on the natural gradient method", JMLR 21, 2020, sections 5 and 6; Morales, Nocedal,
        "Automatic preconditioning by limited memory quasi-Newton updating", SIAM J. Optim. 10(4), 2000.
    """

    _: KW_ONLY
    max_divergence: Hyperparameter | None = hyperparameter(
        default=None, doc=r":math:`\delta`; None bounds nothing."
    )
    maximize: bool = option(default=False, doc="Climb; the metric is the same.")

    call, matrix, diagonal = "natural_gradient(...)", "fisher_products", "gauss_newton"
    above_zero = ("max_divergence",)

    def bound(self, problem: StepProblem, step: NewtonStep, number: int) -> Tensor:
        """Return the part of a step at which the divergence of predictions reaches its bound, at most 1."""
        whole = torch.ones_like(step.slope)
        if self.max_divergence is None:
            return whole
        moves = step.curved > 0
        bound = divide(2 * problem.space.each(self.value("max_divergence", number)), step.curved, where=moves)
        return torch.where(moves & (bound < 1), torch.where(moves, bound, 1.0).sqrt(), whole)


natural_gradient = NaturalGradientRule


class NaturalGradient(NewtonOptimizer, rule=NaturalGradientRule):
    r"""Optimize by natural gradient descent, with the exact Fisher matrix.

    .. math:: (F_t + \lambda I) \, d_t \approx -g_t, \qquad
        w_t = w_{t-1} + \alpha_t \min\Bigl(\eta, \sqrt{2 \delta / d_t^\top F_t d_t}\Bigr) \, d_t

    with a damping that follows the ratio of reduction, and a line search where a step would climb. The loss is to be
    computed as for :class:`GaussNewton`: it is the likelihood.

    Raises:
        ValueError: As for :class:`GaussNewton`.
        TypeError: As for :class:`GaussNewton`.

    Example:
        >>> from metagrad.optim import NaturalGradient
        >>> model = torch.nn.Linear(4, 3)
        >>> opt = NaturalGradient(model.parameters(), lr=0.5, damping=0.1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(torch.eye(4)), torch.tensor([0, 1, 2, 0]))
        ...     loss.backward()
        ...     return loss
        >>> losses = [float(opt.step(closure)) for _ in range(10)]
        >>> losses[-1] < losses[0] / 2
        True

    References:
        Amari, Neural Computation 10(2), 1998; Martens, JMLR 21, 2020.
    """

    options = MINIBATCH_OPTIONS
    notes_losses = True
    differentiates_gradients = False
    whole = "natural_gradient"
    adapted = "damping"
