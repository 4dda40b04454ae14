"""Optimizers of torch's kind that torch does not have, or not exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from metagrad.optim.first_order.adagrad import adagrad
from metagrad.optim.first_order.adam import adam
from metagrad.optim.first_order.lion import lion
from metagrad.optim.kronecker.muon import muon
from metagrad.optim.torch_optim.optimizer import ParameterGroups, RuleOptimizer


class Lion(RuleOptimizer):
    r"""Optimize by Lion: steps of the same length in every element, along the sign of a momentum.

    .. math:: w_t &= w_{t-1} - \eta \bigl(\operatorname{sign}(\beta_1 m_{t-1} + (1 - \beta_1) g_t)
                     + \lambda w_{t-1}\bigr) \\
              m_t & = \beta_2 m_{t-1} + (1 - \beta_2) g_t

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`; 3 to 10 times smaller than Adam's.
        betas: The share of the average in the direction, and how much of the average is kept.
        weight_decay: The factor :math:`\lambda`, as much larger than Adam's as ``lr`` is smaller.
        foreach: Move parameters as one long vector; None does so for small ones.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.first_order import Lion
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> opt = Lion([w], lr=0.5)
        >>> (w**2).sum().backward()
        >>> opt.step()
        >>> w
        tensor([ 0.5000, -1.5000], requires_grad=True)

    References:
        Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023, algorithm 2.
    """

    make_rule = staticmethod(lion)

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float | Tensor = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            foreach=foreach,
        )


class Muon(RuleOptimizer):
    r"""Optimize matrices by Muon: momentum, made nearly orthogonal by Newton-Schulz iterations.

    .. math:: w_t = (1 - \eta \lambda) w_{t-1} - \eta \, c \, \mathrm{NS}(m_t)

    see :func:`~metagrad.optim.kronecker.muon.muon`. It is for the weights of hidden layers: every parameter must be a
    matrix, and embeddings, biases and output layers go to another optimizer.

    Args:
        params: Matrices, with names or without, or groups of them.
        lr: The step size :math:`\eta`.
        weight_decay: The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.
        momentum: How much of the average of the gradients is kept.
        nesterov: Look ahead along the new average.
        ns_coefficients: Of the polynomial of each iteration, three numbers; as many iterations as there are.
        eps: The least that a matrix is divided by.
        adjust_lr_fn: What the step is multiplied by, for the shape of the matrix: ``"original"``, the root of the
            ratio of rows to columns if above 1, or ``"match_rms_adamw"``, 0.2 times the root of the larger.
        ns_dtype: What the iterations are calculated in; None is the dtype of the parameter.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.

    Raises:
        ValueError: A parameter is no matrix, or a hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.first_order import Muon
        >>> model = torch.nn.Linear(3, 3, bias=False)
        >>> opt = Muon(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 3)).square().sum().backward()
        >>> opt.step()

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable
        for LLM training", arXiv:2502.16982, section 2.2.
    """

    make_rule = staticmethod(muon)
    elementwise = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        *,
        ns_coefficients: Sequence[Sequence[float]] = ((3.4445, -4.775, 2.0315),) * 5,
        eps: float | Tensor = 1e-7,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        ns_dtype: torch.dtype | None = torch.bfloat16,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "adjust_lr_fn": adjust_lr_fn,
                "ns_dtype": ns_dtype,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
        )


class SparseAdam(RuleOptimizer):
    r"""Optimize embedding tables by Adam, exactly, at the cost of the rows touched so far.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= w_{t-1} - \eta \, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    A row that was ever touched moves at every step, since its momentum does; one that never was stays, in the dense
    optimizer too. So the table is that of ``torch.optim.Adam`` on dense gradients, whereas ``torch.optim.SparseAdam``
    lets the averages of untouched rows stand still, and is another optimizer. The state holds the rows touched so
    far. Dense gradients are taken as well.

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`.
        betas: How much of the averages of gradients and of their squares is kept, each from 0 to below 1.
        eps: What is added to the root.
        amsgrad: Divide by the root of the largest :math:`v` so far.
        foreach: Move parameters as one long vector; None does so for small ones.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.first_order import SparseAdam
        >>> table = torch.nn.Embedding(1000, 2, sparse=True)
        >>> opt = SparseAdam(table.parameters(), lr=0.1)
        >>> table(torch.tensor([7, 7, 3])).square().sum().backward()
        >>> opt.step()
        >>> opt.state[table.weight]["rows"]
        tensor([3, 7])

    References:
        Kingma, Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1.
    """

    make_rule = staticmethod(adam)

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | Tensor = 1e-8,
        *,
        amsgrad: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            foreach=foreach,
        )


class SparseAdagrad(RuleOptimizer):
    r"""Optimize embedding tables by Adagrad, exactly, with state for the rows touched so far.

    .. math:: s_t = s_{t-1} + g_t^2, \qquad
              w_t = w_{t-1} - \frac{\eta}{1 + (t - 1) \gamma} \, \frac{g_t}{\sqrt{s_t} + \epsilon}

    equal to ``torch.optim.Adagrad``, which keeps a state of the size of the table. Dense gradients are taken as well.

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`.
        lr_decay: How fast it shrinks from step to step, :math:`\gamma`.
        initial_accumulator_value: The sum :math:`s_0` before the first step.
        eps: What is added to the root.
        foreach: Move parameters as one long vector; None does so for small ones.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.first_order import SparseAdagrad
        >>> table = torch.nn.Embedding(1000, 2, sparse=True)
        >>> opt = SparseAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([7, 7, 3])).square().sum().backward()
        >>> opt.step()
        >>> opt.state[table.weight]["total"].shape
        torch.Size([2, 2])

    References:
        Duchi, Hazan, Singer, "Adaptive subgradient methods for online learning and stochastic optimization",
        JMLR 12, 2011, section 1.3.
    """

    make_rule = staticmethod(adagrad)

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1e-2,
        lr_decay: float | Tensor = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float | Tensor = 1e-10,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "eps": eps,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            foreach=foreach,
        )
