"""Newton's method by conjugate gradients, damped: Hessian-free optimization."""

from __future__ import annotations

from dataclasses import KW_ONLY

from metagrad.optim.newton.damped import Damped
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter, option
from metagrad.optim.torch_optim.newton_optimizer import MINIBATCH_OPTIONS, NewtonOptimizer


@functional_optimizer
class NewtonCGRule(Damped):
    r"""The functional form of Hessian-free Newton steps.

    .. math::
        (H_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \alpha_t s_t, \qquad
        s_t = \eta \, d_t, \qquad
        \rho_t = \frac{f(w_{t-1} + s_t) - f(w_{t-1})}{g_t^\top s_t + s_t^\top H_t s_t / 2}

    with the Hessian :math:`H` known by its products and :math:`d` from conjugate gradients. The length
    :math:`\alpha` is the largest of 1, 1/2, 1/4, ... at which the loss falls by :math:`10^{-4}` of the slope. The
    damping :math:`\lambda` is divided by ``change`` where :math:`\rho > 3/4`, and multiplied where
    :math:`\rho < 1/4`; from 0 it begins at a tenth of the curvature along the step.

    Where conjugate gradients meet a direction :math:`p` of negative curvature, they take one last step along it, by
    the absolute value of the curvature, which descends, and leaves saddle points that gradient descent is slow to
    leave. A gradient of exactly zero is taken for a minimum.

    With ``curvature_every`` above 1, the steps between two solves multiply with nothing. Their directions are by the
    limited-memory BFGS matrix of pairs :math:`p_i, (H + \lambda I) p_i` that the last solve went through. Their
    lengths are looked for as well; the damping stays, as there is no model to compare a reduction with.

    Derivatives with respect to parameters and hyper-parameters are those of the steps that conjugate gradients took,
    and hold the graph of each; numbers that jump (lengths, factors of the damping, how many steps) are constants.

    Example:
        One step to the minimum of a quadratic:

        >>> from metagrad.optim.newton.newton_cg import newton_cg
        >>> from metagrad.optim.objective import TapeObjective
        >>> rule, params = newton_cg(), {"w": torch.zeros(2, requires_grad=True)}
        >>> objective = TapeObjective(lambda p: (torch.tensor([1.0, 4.0]) * (p["w"] - 3) ** 2).sum(), params)
        >>> new, state = rule.update(objective.grads, rule.init(params), params, objective)
        >>> torch.allclose(new["w"], torch.tensor(3.0)), int(state.report.steps), round(float(state.report.ratio), 4)
        (True, 2, 1.0)

    References:
        Martens, "Deep learning via Hessian-free optimization", ICML 2010, section 4; Nocedal, Wright, "Numerical
        optimization", 2006, section 7.1; Dauphin et al., "Identifying and attacking the saddle point problem in
        high-dimensional non-convex optimization", NeurIPS 2014; Morales, Nocedal, "Automatic preconditioning by
        limited memory quasi-Newton updating", SIAM J. Optim. 10(4), 2000; Martens, section 4.7, for the exponent.
    """

    _: KW_ONLY
    damping: Hyperparameter = hyperparameter(
        default=0.0,
        doc=r":math:`\lambda_0`; a schedule of it is multiplied by what the ratios have made of 1.",
    )
    change: float = option(default=1.5, doc="The factor of the damping, above 1.")

    call, matrix = "newton_cg(...)", "products"
    diagonal = "hessian"


newton_cg = NewtonCGRule


class NewtonCG(NewtonOptimizer, rule=NewtonCGRule):
    r"""Optimize by Newton's method with conjugate gradients: Hessian-free optimization.

    .. math:: (H_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \eta \, \alpha_t d_t

    with a damping that follows the ratio of reduction, a line search, and steps along negative curvature, and
    :class:`~metagrad.optim.torch_optim.newton_optimizer.NewtonOptimizer` for the closure and ``opt.stats``.

    Raises:
        ValueError: A hyper-parameter is out of its range, or parameters of a group differ in dtype or device.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim import NewtonCG
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> opt = NewtonCG([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (torch.tensor([1.0, 100.0]) * (w - 3) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> float(opt.step(closure)), torch.allclose(w, torch.tensor(3.0)), opt.stats["direction"]
        (104.0, True, 'newton')

        Products with a quarter of the data, at every third step:

        >>> x = torch.sin(torch.arange(64.0))
        >>> w = torch.zeros(2, requires_grad=True)
        >>> opt = NewtonCG([w], curvature_fraction=0.25, curvature_every=3)
        >>> def closure(fraction=1.0):
        ...     opt.zero_grad()
        ...     part = x[: round(fraction * len(x))]
        ...     loss = ((w[0] * part + w[1] - (2 * part + 1)) ** 2).mean()
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(8):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.tensor([2.0, 1.0]), atol=1e-4), opt.stats["products"]
        (True, 0)

    References:
        Martens, "Deep learning via Hessian-free optimization", ICML 2010.
    """

    options = MINIBATCH_OPTIONS
    adapted = "damping"
