"""Shampoo and SOAP as optimizers of torch's kind."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from metagrad.optim.kronecker.shampoo import shampoo
from metagrad.optim.kronecker.soap import soap
from metagrad.optim.torch_optim.optimizer import ParameterGroups, RuleOptimizer


class Shampoo(RuleOptimizer):
    r"""Optimize by Shampoo: a matrix for each axis of a parameter, whose inverse roots precondition the gradient.

    .. math:: W_t = (1 - \eta \lambda) W_{t-1} - \eta V_t, \qquad
              V_t = \mu V_{t-1} + (L_t + \epsilon I)^{-1/4} \, G_t \, (R_t + \epsilon I)^{-1/4}

    see :func:`~metagrad.optim.kronecker.shampoo.shampoo`, whose steps these are. Sparse gradients are refused.

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`; if grafted, that of the other rule.
        momentum: How much of the last steps is kept.
        decay: How much of the statistics is kept; 1, the number, sums them.
        eps: What is added to the eigenvalues of the statistics.
        weight_decay: The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.
        graft: Give each parameter's step the length that it has by ``"sgd"``, ``"adagrad"`` or ``"adam"``.
        graft_decay: How much of the average of squares is kept, by ``"adam"``.
        graft_eps: What is added to the root of the squares.
        exponent: The p of the roots; None is twice the number of axes.
        block_size: Longer axes are cut into parts of at most so many.
        root_every: Steps from one computation of the roots to the next.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be factorised,
            parameters and state stay as they are, and a step ``"raise"``s an error, or is left out (``"skip"``) and
            counted in ``opt.stats``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        The first step is along the gradient with all singular values 1:

        >>> from metagrad.optim.torch_optim.kronecker import Shampoo
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> opt = Shampoo([w], lr=1.0)
        >>> (w * torch.tensor([[0.0, 4.0], [9.0, 0.0]])).sum().backward()
        >>> opt.step()
        >>> w.detach().round(decimals=4) + 0.0
        tensor([[ 0., -1.],
                [-1.,  0.]])

    References:
        Gupta, Koren, Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018; Anil et al.,
        "Scalable second order optimization for deep learning", arXiv:2002.09018.
    """

    make_rule = staticmethod(shampoo)
    elementwise = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 0.1,
        momentum: float | Tensor = 0.9,
        decay: float | Tensor = 1.0,
        eps: float | Tensor = 1e-6,
        weight_decay: float | Tensor = 0.0,
        *,
        graft: Literal["sgd", "adagrad", "adam"] | None = None,
        graft_decay: float | Tensor = 0.999,
        graft_eps: float | Tensor = 1e-8,
        exponent: int | None = None,
        block_size: int = 1024,
        root_every: int = 1,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "decay": decay,
                "eps": eps,
                "weight_decay": weight_decay,
                "graft": graft,
                "graft_decay": graft_decay,
                "graft_eps": graft_eps,
                "exponent": exponent,
                "block_size": block_size,
                "root_every": root_every,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
        )


class SOAP(RuleOptimizer):
    r"""Optimize by SOAP: Adam in the eigenbasis of Shampoo's matrices.

    .. math:: W_t = (1 - \eta \lambda) W_{t-1} - \eta \, Q_L \, \mathrm{Adam}(Q_L^\top G Q_R) \, Q_R^\top

    see :func:`~metagrad.optim.kronecker.soap.soap`, whose steps these are. Sparse gradients are refused.

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`; in the paper 3e-3, for language models of 360 million parameters and more.
        betas: How much of the average of gradients, and of those of squares and of statistics, is kept.
        eps: What is added to the root.
        weight_decay: The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.
        shift: The share of their mean eigenvalue that is added to statistics where bases are computed.
        basis_every: Steps from one iteration of the bases to the next.
        max_size: Longer axes have no basis.
        precondition_1d: Give vectors a basis too.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be factorised,
            parameters and state stay as they are, and a step ``"raise"``s an error, or is left out (``"skip"``) and
            counted in ``opt.stats``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.kronecker import SOAP
        >>> w = torch.zeros(2, 2, requires_grad=True)
        >>> opt = SOAP([w], lr=1.0)
        >>> (w * torch.tensor([[0.0, 4.0], [9.0, 0.0]])).sum().backward()
        >>> opt.step()
        >>> w.detach().round(decimals=4) + 0.0
        tensor([[ 0., -1.],
                [-1.,  0.]])

    References:
        Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", arXiv:2409.11321.
    """

    make_rule = staticmethod(soap)
    elementwise = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1e-2,
        betas: tuple[float | Tensor, float | Tensor] = (0.95, 0.95),
        eps: float | Tensor = 1e-8,
        weight_decay: float | Tensor = 0.01,
        *,
        shift: float | Tensor = 1e-6,
        basis_every: int = 10,
        max_size: int = 10000,
        precondition_1d: bool = False,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "shift": shift,
                "basis_every": basis_every,
                "max_size": max_size,
                "precondition_1d": precondition_1d,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
        )
