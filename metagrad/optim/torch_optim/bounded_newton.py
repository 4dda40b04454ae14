"""Newton's method with bounded steps, by a cubic term or a trust region, as optimizers of torch's kind."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from metagrad.optim.newton.cubic_newton import cubic_newton
from metagrad.optim.newton.trust_region_newton import trust_region_newton
from metagrad.optim.torch_optim.newton_optimizer import NewtonOptimizer
from metagrad.optim.torch_optim.optimizer import ParameterGroups


class CubicNewton(NewtonOptimizer):
    r"""Optimize by Newton's method with cubic regularisation.

    .. math:: w_t = w_{t-1} + \eta \operatorname*{argmin}_d \;
        g_t^\top d + \tfrac{1}{2} d^\top H_t d + \tfrac{M_t}{6} |d|^3

    see :func:`~metagrad.optim.newton.cubic_newton.cubic_newton`, whose steps these are.

    Args:
        params: Parameters, with names or without, or groups of them, which make one vector.
        lr: The factor :math:`\eta` of every step.
        weight_decay: Of the loss with the penalty of half of it times the squared norm of the parameters.
        cubic: :math:`M_0`, above 0; setting it in a group scales what has been adapted.
        adapt: Look at the loss at the end of a step, which needs a closure.
        rtol: The Lanczos process ends when the gradient of the model is so small, relative to that of the loss.
        max_steps: The most steps of the Lanczos process, which keeps so many vectors.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim.torch_optim.bounded_newton import CubicNewton
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
        weight_decay: float | Tensor = 0.0,
        cubic: float | Tensor = 1.0,
        adapt: bool = True,
        rtol: float = 1e-10,
        max_steps: int = 50,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "cubic": cubic,
                "adapt": adapt,
                "rtol": rtol,
                "max_steps": max_steps,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
        )


class TrustRegionNewton(NewtonOptimizer):
    r"""Optimize by Newton's method within a trust region, with conjugate gradients.

    .. math:: w_t = w_{t-1} + \operatorname*{argmin}_{|d| \le \Delta_t} \; g_t^\top d + \tfrac{1}{2} d^\top H_t d

    see :func:`~metagrad.optim.newton.trust_region_newton.trust_region_newton`, whose steps these are.

    Args:
        params: Parameters, with names or without, or groups of them, which make one vector.
        lr: A factor of every step.
        weight_decay: Of the loss with the penalty of half of it times the squared norm of the parameters.
        radius: :math:`\Delta_0`, above 0; setting it in a group scales the radius that has been adapted.
        max_radius: The largest radius.
        accept: The ratio of reductions above which a step is taken, below 1/4.
        adapt: Look at the loss at the end of a step, which needs a closure.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        boundary_steps: The most steps of the Lanczos process that goes on where they leave the region, and keeps so
            many vectors; with 0 the step ends there.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> from metagrad.optim.torch_optim.bounded_newton import TrustRegionNewton
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
        Steihaug, SIAM J. Numer. Anal. 20(3), 1983; Gould, Lucidi, Roma, Toint, SIAM J. Optim. 9(2), 1999.
    """

    make_rule = staticmethod(trust_region_newton)
    adapted = "radius"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        weight_decay: float | Tensor = 0.0,
        radius: float | Tensor = 1.0,
        max_radius: float = 1e3,
        accept: float = 1e-4,
        adapt: bool = True,
        rtol: float = 1e-10,
        progress: float | None = None,
        max_steps: int = 250,
        boundary_steps: int = 50,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "radius": radius,
                "max_radius": max_radius,
                "accept": accept,
                "adapt": adapt,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "boundary_steps": boundary_steps,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
        )
