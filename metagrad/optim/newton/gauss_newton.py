"""Levenberg's and Marquardt's method: damped Gauss-Newton steps by conjugate gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY

from metagrad.optim.newton.damped import Damped
from metagrad.optim.rule import functional_optimizer, option
from metagrad.optim.torch_optim.newton_optimizer import MINIBATCH_OPTIONS, NewtonOptimizer


@functional_optimizer
class GaussNewtonRule(Damped):
    r"""The functional form of Levenberg and Marquardt, for any loss whose curvature in the output is known.

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

    _: KW_ONLY
    maximize: bool = option(default=False, doc="Climb, where the loss is the negative of one of known form.")

    call, matrix = "gauss_newton(...)", "gauss_newton_products"
    diagonal = "gauss_newton"


gauss_newton = GaussNewtonRule


class GaussNewton(NewtonOptimizer, rule=GaussNewtonRule):
    r"""Optimize by the method of Levenberg and Marquardt, for losses whose curvature in the output is known.

    .. math:: (J_t^\top H_L J_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \eta \, \alpha_t d_t

    with a damping that follows the ratio of reduction, and a line search where a step would climb. The loss is to be
    computed inside the closure, or within ``with opt.recording():``, where calls of ``F.mse_loss``,
    ``F.cross_entropy``, ``F.nll_loss``, ``F.gaussian_nll_loss``, ``F.binary_cross_entropy`` and
    ``F.binary_cross_entropy_with_logits`` (also by their modules) are noted. Residuals ``r`` are ``F.mse_loss(r,
    torch.zeros_like(r))``, a likelihood written by hand is :meth:`output_loss`, and
    :func:`metagrad.optim.least_squares` fits residuals without a loop. What else the loss contains, such as a
    penalty, is in the gradient alone.

    Raises:
        ValueError: A hyper-parameter is out of its range, or parameters of a group differ in dtype or device; in a
            step, the loss contains none of known form.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim import GaussNewton
        >>> x, w = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0.0], requires_grad=True)
        >>> opt = GaussNewton([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(w[0] * torch.exp(w[1] * x), 2 * torch.exp(-x))
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(12):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.tensor([2.0, -1.0]), atol=1e-4)
        True

    References:
        Marquardt, J. SIAM 11(2), 1963; Schraudolph, Neural Computation 14(7), 2002.
    """

    options = MINIBATCH_OPTIONS
    adapted = "damping"
    notes_losses = True
    differentiates_gradients = False
