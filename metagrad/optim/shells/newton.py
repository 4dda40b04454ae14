"""Newton's method and its relatives as optimizers of torch's kind."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from metagrad.optim.rules.cubic_newton import cubic_newton
from metagrad.optim.rules.gauss_newton import gauss_newton
from metagrad.optim.rules.lbfgs import lbfgs
from metagrad.optim.rules.natural_gradient import natural_gradient
from metagrad.optim.rules.newton_cg import newton_cg
from metagrad.optim.rules.trust_region_newton import trust_region_newton
from metagrad.optim.shells.newton_optimizer import NewtonOptimizer
from metagrad.optim.shells.optimizer import ParameterGroups


class NewtonCG(NewtonOptimizer):
    r"""Optimize by Newton's method with conjugate gradients: Hessian-free optimization.

    .. math:: (H_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \eta \, \alpha_t d_t

    with a damping that follows the ratio of reduction, a line search, and steps along negative curvature; see
    :func:`~metagrad.optim.rules.newton_cg.newton_cg`, whose steps these are, and
    :class:`~metagrad.optim.shells.newton_optimizer.NewtonOptimizer` for the closure and ``opt.stats``.

    Args:
        params: Parameters, with names or without, or groups of them; each group is a block of its own.
        lr: The factor :math:`\eta` of every step.
        damping: :math:`\lambda_0`; setting it in a group scales the damping that has been adapted.
        warm_start: Conjugate gradients begin at so much of their last solution.
        adapt: Look at the loss at the end of a step, for the damping and the length, which needs a closure.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        maximize: Climb.

    Raises:
        ValueError: A hyper-parameter is out of its range, or parameters of a group differ in dtype or device.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.shells.newton import NewtonCG
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> opt = NewtonCG([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (torch.tensor([1.0, 100.0]) * (w - 3) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> float(opt.step(closure)), torch.allclose(w, torch.tensor(3.0)), opt.stats["direction"]
        (104.0, True, 'newton')

    References:
        Martens, "Deep learning via Hessian-free optimization", ICML 2010.
    """

    make_rule = staticmethod(newton_cg)
    adapted = "damping"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        damping: float | Tensor = 0.0,
        warm_start: float | Tensor = 0.0,
        adapt: bool = True,
        change: float = 1.5,
        rtol: float = 1e-10,
        progress: float | None = 5e-4,
        max_steps: int = 250,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "damping": damping,
                "warm_start": warm_start,
                "adapt": adapt,
                "change": change,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "maximize": maximize,
            },
        )


class GaussNewton(NewtonOptimizer):
    r"""Optimize by the method of Levenberg and Marquardt, for losses whose curvature in the output is known.

    .. math:: (J_t^\top H_L J_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \eta \, d_t

    see :func:`~metagrad.optim.rules.gauss_newton.gauss_newton`, whose steps these are. The loss is to be computed
    inside the closure, or within ``with opt.recording():``, where calls of ``F.mse_loss``, ``F.cross_entropy``,
    ``F.nll_loss``, ``F.gaussian_nll_loss``, ``F.binary_cross_entropy`` and ``F.binary_cross_entropy_with_logits``
    (also by their modules) are noted. What else it contains, such as a penalty, is in the gradient alone.

    Args:
        params: Parameters, with names or without, or groups of them; each group is a block of its own.
        lr: The factor :math:`\eta` of every step.
        damping: :math:`\lambda_0`; setting it in a group scales the damping that has been adapted.
        warm_start: Conjugate gradients begin at so much of their last solution.
        adapt: Look at the loss at the end of a step, for the damping, which needs a closure.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        maximize: Climb, where the loss is the negative of one of known form.

    Raises:
        ValueError: A hyper-parameter is out of its range, or parameters of a group differ in dtype or device; in a
            step, the loss contains none of known form.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.shells.newton import GaussNewton
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

    make_rule = staticmethod(gauss_newton)
    adapted = "damping"
    notes_losses = True
    differentiates_twice = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        damping: float | Tensor = 1e-3,
        warm_start: float | Tensor = 0.0,
        adapt: bool = True,
        change: float = 3.0,
        rtol: float = 1e-10,
        progress: float | None = 5e-4,
        max_steps: int = 250,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "damping": damping,
                "warm_start": warm_start,
                "adapt": adapt,
                "change": change,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "maximize": maximize,
            },
        )


class NaturalGradient(NewtonOptimizer):
    r"""Optimize by natural gradient descent, with the exact Fisher matrix.

    .. math:: (F_t + \lambda I) \, d_t \approx -g_t, \qquad
        w_t = w_{t-1} + \min\Bigl(\eta, \sqrt{2 \delta / d_t^\top F_t d_t}\Bigr) \, d_t

    see :func:`~metagrad.optim.rules.natural_gradient.natural_gradient`, whose steps these are. The loss is to be
    computed as for :class:`GaussNewton`: it is the likelihood.

    Args:
        params: Parameters, with names or without, or groups of them; each group is a block of its own.
        lr: The step size :math:`\eta`.
        damping: :math:`\lambda`.
        max_divergence: The bound :math:`\delta` of the divergence of predictions; None bounds nothing.
        warm_start: Conjugate gradients begin at so much of their last solution.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        maximize: Climb; the metric is the same.

    Raises:
        ValueError: As for :class:`GaussNewton`.
        TypeError: As for :class:`GaussNewton`.

    Example:
        >>> from metagrad.optim.shells.newton import NaturalGradient
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

    make_rule = staticmethod(natural_gradient)
    notes_losses = True
    differentiates_twice = False
    whole = "natural_gradient"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        damping: float | Tensor = 1e-3,
        max_divergence: float | Tensor | None = None,
        warm_start: float | Tensor = 0.0,
        rtol: float = 1e-10,
        progress: float | None = 5e-4,
        max_steps: int = 250,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "damping": damping,
                "max_divergence": max_divergence,
                "warm_start": warm_start,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "maximize": maximize,
            },
        )


class CubicNewton(NewtonOptimizer):
    r"""Optimize by Newton's method with cubic regularisation.

    .. math:: w_t = w_{t-1} + \eta \operatorname*{argmin}_d \;
        g_t^\top d + \tfrac{1}{2} d^\top H_t d + \tfrac{M_t}{6} |d|^3

    see :func:`~metagrad.optim.rules.cubic_newton.cubic_newton`, whose steps these are.

    Args:
        params: Parameters, with names or without, or groups of them; each group is a block of its own.
        lr: The factor :math:`\eta` of every step.
        cubic: :math:`M_0`, above 0; setting it in a group scales what has been adapted.
        adapt: Look at the loss at the end of a step, which needs a closure.
        rtol: The Lanczos process ends when the gradient of the model is so small, relative to that of the loss.
        max_steps: The most steps of the Lanczos process, which keeps so many vectors.
        maximize: Climb.

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim.shells.newton import CubicNewton
        >>> w = torch.tensor([0.0, 0.1], requires_grad=True)
        >>> opt = CubicNewton([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w[0] ** 2 - w[1] ** 2 + w[1] ** 4 / 2
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(15):
        ...     loss = opt.step(closure)
        >>> round(float(loss), 4)
        -0.5

    References:
        Nesterov, Polyak, Mathematical Programming 108, 2006.
    """

    make_rule = staticmethod(cubic_newton)
    adapted = "cubic"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        cubic: float | Tensor = 1.0,
        adapt: bool = True,
        rtol: float = 1e-10,
        max_steps: int = 50,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "cubic": cubic,
                "adapt": adapt,
                "rtol": rtol,
                "max_steps": max_steps,
                "maximize": maximize,
            },
        )


class TrustRegionNewton(NewtonOptimizer):
    r"""Optimize by Newton's method within a trust region, with Steihaug's conjugate gradients.

    .. math:: w_t = w_{t-1} + \operatorname*{argmin}_{|d| \le \Delta_t} \; g_t^\top d + \tfrac{1}{2} d^\top H_t d

    see :func:`~metagrad.optim.rules.trust_region_newton.trust_region_newton`, whose steps these are.

    Args:
        params: Parameters, with names or without, or groups of them; each group is a block of its own.
        lr: A factor of every step.
        radius: :math:`\Delta_0`, above 0; setting it in a group scales the radius that has been adapted.
        max_radius: The largest radius.
        accept: The ratio of reductions above which a step is taken, below 1/4.
        adapt: Look at the loss at the end of a step, which needs a closure.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        maximize: Climb.

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim.shells.newton import TrustRegionNewton
        >>> w = torch.tensor([0.0, 0.0], requires_grad=True)
        >>> opt = TrustRegionNewton([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (w - torch.tensor([3.0, 4.0])).pow(2).sum()
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
        >>> w.detach(), opt.stats["direction"], opt.stats["radius"]
        (tensor([0.6000, 0.8000]), 'boundary', 2.0)

    References:
        Steihaug, SIAM J. Numer. Anal. 20(3), 1983.
    """

    make_rule = staticmethod(trust_region_newton)
    adapted = "radius"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        radius: float | Tensor = 1.0,
        max_radius: float = 1e3,
        accept: float = 1e-4,
        adapt: bool = True,
        rtol: float = 1e-10,
        progress: float | None = None,
        max_steps: int = 250,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "radius": radius,
                "max_radius": max_radius,
                "accept": accept,
                "adapt": adapt,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "maximize": maximize,
            },
        )


class LBFGS(NewtonOptimizer):
    r"""Optimize by L-BFGS, one iteration a step.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    see :func:`~metagrad.optim.rules.lbfgs.lbfgs`, whose steps these are. ``torch.optim.LBFGS`` takes up to 20
    iterations in a step, and one group; a step here is one, for groups that are blocks of their own, with gradients
    that may be clipped or accumulated where there is no line search.

    Args:
        params: Parameters, with names or without, or groups of them; each group is a block of its own.
        lr: The factor :math:`\eta` of every step.
        history: How many pairs are kept.
        line_search: ``"strong_wolfe"`` looks for a length, and needs a closure; None takes ``lr``.
        max_evaluations: The most gradients of a line search.
        maximize: Climb.

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim.shells.newton import LBFGS
        >>> w = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
        >>> opt = LBFGS([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(50):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.ones_like(w))
        True

    References:
        Liu, Nocedal, Mathematical Programming 45, 1989.
    """

    make_rule = staticmethod(lbfgs)
    differentiates_twice = False
    whole = "quasi_newton"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        history: int = 10,
        line_search: Literal["strong_wolfe"] | None = "strong_wolfe",
        max_evaluations: int = 25,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "history": history,
                "line_search": line_search,
                "max_evaluations": max_evaluations,
                "maximize": maximize,
            },
        )
