"""Natural gradient descent: the gradient in the metric of the Fisher matrix, by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from metagrad.curvature.solvers.iteration import divide
from metagrad.optim.newton.damped import Damped
from metagrad.optim.newton.second_order import Problem, Step
from metagrad.optim.rule import Hyperparameter


@dataclass(frozen=True, eq=False)
class NaturalGradient(Damped):
    """The rule that :func:`natural_gradient` makes."""

    lr: Hyperparameter = 1.0
    damping: Hyperparameter = 1e-3
    weight_decay: Hyperparameter = 0.0
    max_divergence: Hyperparameter | None = None
    warm_start: Hyperparameter = 0.0
    adapt: bool = True
    change: float = 3.0
    rtol: float = 1e-10
    progress: float | None = 5e-4
    max_steps: int = 250
    curvature_every: int = 1
    pairs: int = 16
    preconditioner: Literal["diagonal"] | None = None
    exponent: Hyperparameter = 0.75
    samples: int = 8
    maximize: bool = False
    batch_ndim: int = 0

    call, matrix, diagonal = "natural_gradient(...)", "fisher_products", "gauss_newton"
    hyper = ("lr", "damping", "weight_decay", "max_divergence", "warm_start", "exponent")
    above_zero = ("max_divergence",)

    def bound(self, problem: Problem, step: Step, number: int) -> Tensor:
        """Return the part of a step at which the divergence of predictions reaches its bound, at most 1."""
        whole = torch.ones_like(step.slope)
        if self.max_divergence is None:
            return whole
        moves = step.curved > 0
        bound = divide(2 * problem.space.each(self.value("max_divergence", number)), step.curved, where=moves)
        return torch.where(moves & (bound < 1), torch.where(moves, bound, 1.0).sqrt(), whole)


def natural_gradient(
    lr: Hyperparameter = 1.0,
    *,
    damping: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.0,
    max_divergence: Hyperparameter | None = None,
    warm_start: Hyperparameter = 0.0,
    adapt: bool = True,
    change: float = 3.0,
    rtol: float = 1e-10,
    progress: float | None = 5e-4,
    max_steps: int = 250,
    curvature_every: int = 1,
    pairs: int = 16,
    preconditioner: Literal["diagonal"] | None = None,
    exponent: Hyperparameter = 0.75,
    samples: int = 8,
    maximize: bool = False,
) -> NaturalGradient:
    r"""Make the rule of natural gradient descent.

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

    Args:
        lr: The step size :math:`\eta`, in the forms of :data:`Hyperparameter`; may require grad, as may the next four
            and ``exponent``. Of a dict, the direction is that of all parameters together.
        damping: :math:`\lambda_0`, likewise; a schedule of it is multiplied by what the ratios have made of 1.
        weight_decay: :math:`\gamma`: the loss is taken with the penalty :math:`\gamma |w|^2 / 2`, in gradient, matrix
            and ratio; forms as for ``lr``.
        max_divergence: :math:`\delta`; None bounds nothing.
        warm_start: Conjugate gradients begin at so much of their last solution; 0 begins at 0.
        adapt: Look at the loss at the end of a step, for the damping and the length; else both are constant, and a
            step may climb: where predictions saturate, the Fisher matrix vanishes, and the step is as long as the
            damping lets it be.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        curvature_every: Steps from one solve to the next; the first step makes one.
        pairs: How many pairs of a solve are kept for the steps up to the next, evenly over its steps; one of them is
            as large as the parameters twice.
        preconditioner: As for :func:`~metagrad.optim.newton.gauss_newton.gauss_newton`.
        exponent: Its :math:`\alpha`.
        samples: How many draws of the labels the estimate of the diagonal is the mean of.
        maximize: Climb; the metric is the same.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params, curvature)``; ``state.report`` says
        what the step did.

    Raises:
        ValueError: As for :func:`~metagrad.optim.newton.gauss_newton.gauss_newton`.
        TypeError: In ``update``, the curvature has no ``fisher_products``; else as there.

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
    return NaturalGradient(
        lr=lr,
        damping=damping,
        weight_decay=weight_decay,
        max_divergence=max_divergence,
        warm_start=warm_start,
        adapt=adapt,
        change=change,
        rtol=rtol,
        progress=progress,
        max_steps=max_steps,
        curvature_every=curvature_every,
        pairs=pairs,
        preconditioner=preconditioner,
        exponent=exponent,
        samples=samples,
        maximize=maximize,
    )
