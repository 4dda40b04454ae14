"""Newton's method by conjugate gradients, damped: Hessian-free optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from metagrad.optim.newton.damped import Damped
from metagrad.optim.rule import Hyperparameter


@dataclass(frozen=True, eq=False)
class NewtonCG(Damped):
    """The rule that :func:`newton_cg` makes."""

    lr: Hyperparameter = 1.0
    damping: Hyperparameter = 0.0
    weight_decay: Hyperparameter = 0.0
    warm_start: Hyperparameter = 0.0
    adapt: bool = True
    change: float = 1.5
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

    call, matrix = "newton_cg(...)", "products"
    diagonal, hyper = "hessian", ("lr", "damping", "weight_decay", "warm_start", "exponent")


def newton_cg(
    lr: Hyperparameter = 1.0,
    *,
    damping: Hyperparameter = 0.0,
    weight_decay: Hyperparameter = 0.0,
    warm_start: Hyperparameter = 0.0,
    adapt: bool = True,
    change: float = 1.5,
    rtol: float = 1e-10,
    progress: float | None = 5e-4,
    max_steps: int = 250,
    curvature_every: int = 1,
    pairs: int = 16,
    preconditioner: Literal["diagonal"] | None = None,
    exponent: Hyperparameter = 0.75,
    samples: int = 8,
    maximize: bool = False,
) -> NewtonCG:
    r"""Make the rule of Hessian-free Newton steps.

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

    Args:
        lr: The factor :math:`\eta` of every step, in the forms of :data:`Hyperparameter`; may require grad, as may
            the next three and ``exponent``. Of a dict, the direction is that of all parameters together.
        damping: :math:`\lambda_0`, likewise; a schedule of it is multiplied by what the ratios have made of 1.
        weight_decay: :math:`\gamma`: the loss is taken with the penalty :math:`\gamma |w|^2 / 2`, in gradient, matrix
            and ratio; forms as for ``lr``.
        warm_start: Conjugate gradients begin at so much of their last solution, at the cost of one product; 0 begins
            at 0. Martens begins at the whole of it.
        adapt: Look at the loss at the end of a step, for the damping and the length, which costs a forward pass or
            more; else both are constant, and the steps those of a damped Newton's method without safeguards.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        curvature_every: Steps from one solve to the next; the first step makes one.
        pairs: How many pairs of a solve are kept for the steps up to the next, evenly over its steps; one of them is
            as large as the parameters twice.
        preconditioner: ``"diagonal"`` is :math:`(|D| + \lambda_t I)^\alpha`, with an estimate :math:`D` of the
            Hessian's diagonal by Hutchinson's probes at each solve: for parameters of different scales.
        exponent: Its :math:`\alpha`; 1 would be Jacobi's, and trusts the estimate more.
        samples: How many probes the estimate is the mean of, which cost a product each.
        maximize: Climb.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params, curvature)``; ``state.report`` says
        what the step did.

    Raises:
        ValueError: A number is out of its range; in ``init``, parameters are of several dtypes or devices; in
            ``update``, there is no curvature or a gradient is missing.
        TypeError: A hyper-parameter is of an unknown form; in ``init``, a parameter is complex; in ``update``, a
            gradient is sparse, or ``adapt`` is set and the curvature cannot evaluate the loss.

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
    return NewtonCG(
        lr=lr,
        damping=damping,
        weight_decay=weight_decay,
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
