"""Levenberg's and Marquardt's method: damped Gauss-Newton steps by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from metagrad.optim.newton.damped import Damped
from metagrad.optim.rule import Hyperparameter


@dataclass(frozen=True, eq=False)
class GaussNewton(Damped):
    """The rule that :func:`gauss_newton` makes."""

    lr: Hyperparameter = 1.0
    damping: Hyperparameter = 1e-3
    weight_decay: Hyperparameter = 0.0
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

    call, matrix = "gauss_newton(...)", "gauss_newton_products"
    diagonal, hyper = "gauss_newton", ("lr", "damping", "weight_decay", "warm_start", "exponent")


def gauss_newton(
    lr: Hyperparameter = 1.0,
    *,
    damping: Hyperparameter = 1e-3,
    weight_decay: Hyperparameter = 0.0,
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
) -> GaussNewton:
    r"""Make the rule of Levenberg and Marquardt, for any loss whose curvature in the output is known.

    .. math::
        (J_t^\top H_L J_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \alpha_t \eta \, d_t

    with the Jacobian :math:`J` of the model's outputs and the Hessian :math:`H_L` of the loss in them; for squares,
    that is nonlinear least squares. The matrix has no negative curvature, so that the direction descends.

    The damping is multiplied by ``change`` where the ratio of the reductions of the loss and of the quadratic model
    by the whole step :math:`\eta d` is below 1/4, and divided by it above 3/4. Marquardt refuses a step that does not
    descend, and solves again; here the products of the solve are what costs, so its direction is kept, and the length
    :math:`\alpha` is the largest of 1, 1/2, 1/4, ... at which the loss falls by :math:`10^{-4}` of the slope, as in
    :func:`~metagrad.optim.newton.newton_cg.newton_cg`. Where the damping begins much too small, every step moves all
    the same.

    With ``curvature_every`` above 1, the steps between two solves are those that
    :func:`~metagrad.optim.newton.newton_cg.newton_cg` describes.

    Derivatives are those of :func:`~metagrad.optim.newton.newton_cg.newton_cg`.

    Args:
        lr: The factor :math:`\eta` of every step, in the forms of :data:`Hyperparameter`; may require grad, as may
            the next three and ``exponent``. Of a dict, the direction is that of all parameters together.
        damping: :math:`\lambda_0`, likewise; a schedule of it is multiplied by what the ratios have made of 1.
        weight_decay: :math:`\gamma`: the loss is taken with the penalty :math:`\gamma |w|^2 / 2`, in gradient, matrix
            and ratio; forms as for ``lr``.
        warm_start: Conjugate gradients begin at so much of their last solution; 0 begins at 0.
        adapt: Look at the loss at the end of a step, for the damping and the length, which costs a forward pass or
            more; else both are constant, and a step may climb.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        curvature_every: Steps from one solve to the next; the first step makes one.
        pairs: How many pairs of a solve are kept for the steps up to the next, evenly over its steps; one of them is
            as large as the parameters twice.
        preconditioner: ``"diagonal"`` is :math:`(D + \lambda_t I)^\alpha`, with an estimate :math:`D` of the diagonal
            at each solve, by gradients of the loss with labels drawn from the model: for parameters of different
            scales.
        exponent: Its :math:`\alpha`; 1 would be Jacobi's, and trusts the estimate more.
        samples: How many draws of the labels the estimate is the mean of, which cost a gradient each.
        maximize: Climb, where the loss is the negative of one of known form.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params, curvature)``; ``state.report`` says
        what the step did.

    Raises:
        ValueError: A number is out of its range; in ``init``, parameters are of several dtypes or devices; in
            ``update``, there is no curvature, no loss of known form, or a gradient is missing.
        TypeError: As for :func:`~metagrad.optim.newton.newton_cg.newton_cg`.

    Example:
        Linear least squares in one step:

        >>> from metagrad.optim.newton.gauss_newton import gauss_newton
        >>> from metagrad.optim.curvature import KnownDiagonal
        >>> class Known(KnownDiagonal):  # J^T J of the residuals [w_0 - 1, 2 w_1 - 4]
        ...     def gauss_newton_products(self, v):
        ...         return {"w": torch.tensor([1.0, 4.0]) * v["w"]}
        >>> rule, params = gauss_newton(damping=0.0, adapt=False), {"w": torch.zeros(2)}
        >>> new, _ = rule.update({"w": torch.tensor([-1.0, -8.0])}, rule.init(params), params, Known({}))
        >>> new["w"].round(decimals=4)
        tensor([1., 2.])

    References:
        Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", J. SIAM 11(2), 1963;
        Schraudolph, "Fast curvature matrix-vector products", Neural Computation 14(7), 2002; Nocedal, Wright,
        "Numerical optimization", 2006, section 10.3; Martens, "Deep learning via Hessian-free optimization", ICML
        2010, section 4.7, for the preconditioner.
    """
    return GaussNewton(
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
