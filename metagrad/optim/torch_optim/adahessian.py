"""AdaHessian as an optimizer of torch's kind."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from metagrad.optim.diagonal.adahessian import adahessian
from metagrad.optim.torch_optim.diagonal_optimizer import DiagonalOptimizer
from metagrad.optim.torch_optim.optimizer import ParameterGroups


class AdaHessian(DiagonalOptimizer):
    r"""Optimize by AdaHessian: Adam whose second moment is that of the Hessian's diagonal.

    .. math::
        w_t = (1 - \eta \lambda) w_{t-1}
              - \eta \, \frac{m_t / (1 - \beta_1^t)}{\bigl(v_t / (1 - \beta_2^t)\bigr)^{k / 2} + \epsilon}

    with :math:`v` the average of the squares of :math:`z \odot H z`; see
    :func:`~metagrad.optim.diagonal.adahessian.adahessian`, whose steps these are. A closure of the usual form works,
    or ``opt.backward(loss)`` in place of ``loss.backward()``, also with a ``GradScaler``; what does not work is said
    of :class:`~metagrad.optim.torch_optim.curvature_optimizer.CurvatureOptimizer`. A step costs two to three
    gradients.

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`; larger than for Adam.
        betas: How much of the averages of gradients and of squared diagonals is kept, each from 0 to below 1.
        eps: What is added to the diagonal.
        weight_decay: The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.
        hessian_power: The power :math:`k` of the diagonal, from 0 (no curvature) to 1 (Newton's step).
        samples: Probes for each step; each costs a product with the Hessian.
        spatial_average: Average the diagonal over the positions of each convolution kernel.
        foreach: Move parameters as one long vector; None does so for small ones.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.
        seed: Of the probes; None takes ``torch.initial_seed()``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        With a diagonal Hessian the first step is Newton's, to the minimum:

        >>> from metagrad.optim.torch_optim.adahessian import AdaHessian
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> opt = AdaHessian([w], lr=1.0, eps=0.0)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (torch.tensor([1.0, 100.0]) * (w - 3) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure), w
        (tensor(104.), tensor([3., 3.], requires_grad=True))

    References:
        Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, "ADAHESSIAN: an adaptive second order optimizer for machine
        learning", AAAI 2021.
    """

    make_rule = staticmethod(adahessian)

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 0.15,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-4,
        weight_decay: float | Tensor = 0.0,
        *,
        hessian_power: float | Tensor = 1.0,
        samples: int = 1,
        spatial_average: bool = True,
        foreach: bool | None = None,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "hessian_power": hessian_power,
                "samples": samples,
                "spatial_average": spatial_average,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            foreach=foreach,
            seed=seed,
        )
