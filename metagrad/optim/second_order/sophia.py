"""Sophia: a momentum divided by the diagonal of the curvature, clipped element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.curvature.estimators.probes import Generators
from metagrad.optim.second_order.curvature_optimizer import (
    BackwardPass,
    label_gradients,
    options_of,
)
from metagrad.optim.second_order.diagonal_optimizer import DiagonalOptimizer
from metagrad.optim.torch_optim.optimizer import Group, ParameterGroups, as_number


class SophiaH(DiagonalOptimizer):
    r"""Optimize by Sophia-H: a momentum divided by the Hessian's diagonal, clipped element by element.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t \\
        h_t &= \beta_2 h_{t-k} + (1 - \beta_2) \, u \odot (H_t u), \quad u \sim \mathcal{N}(0, I),
               \qquad \text{every } k \text{ steps, else } h_t = h_{t-1} \\
        w_t &= (1 - \eta \lambda) w_{t-1}
               - \eta \, \operatorname{clip}\bigl(m_t / \max(\gamma h_t, \epsilon), 1\bigr)

    If curvature is small or negative, the step is ``lr`` times the sign of the momentum. If the curvature is large,
    the step is a multiple of Newton's step. Use a closure of the usual form, or ``opt.backward(loss)`` instead of
    ``loss.backward()``. Both work with a ``GradScaler``. Limits are listed in
    :class:`~metagrad.optim.second_order.curvature_optimizer.CurvatureOptimizer`. Sparse gradients raise an error.
    Steps between two estimates cost one gradient.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`. Apart from weight decay, no element changes by more than ``lr`` in
            a step. The paper uses 0.8 times the learning rate of Adam for language models of 125 million
            parameters and more, 2e-4 to 6e-4. The default is for small models and fewer steps.
        betas: Decay rates of the averages of gradients and of diagonals, each from 0 to below 1.
        gamma: The factor of the diagonal, which decides how many elements are clipped.
        eps: Smallest divisor of a momentum, above 0.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`. The
            paper uses 0.2.
        curvature_every: Steps from one estimate to the next, :math:`k`. The first step makes an estimate.
        samples: Probes for each estimate.
        maximize: Maximize the loss: negate gradient and curvature. Weights decay as before.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite. ``"raise"`` raises an
            error. ``"skip"`` leaves the step out and counts it in ``opt.stats``. Parameters and state do not change.
        seed: Seed of the random numbers, which also depend on the number of the step. None means
            ``torch.initial_seed()``.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import SophiaH
        >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
        >>> opt = SophiaH([w], lr=0.5)
        >>> opt.backward((w**2).sum())
        >>> opt.step()
        >>> w
        tensor([ 0.5000, -1.5000], requires_grad=True)

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 1 and 3.
    """

    counts = ("samples", "curvature_every")
    distribution = "normal"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 4e-3,
        *,
        betas: tuple[float | Tensor, float | Tensor] = (0.96, 0.99),
        gamma: float | Tensor = 0.01,
        eps: float | Tensor = 1e-12,
        weight_decay: float | Tensor = 0.0,
        curvature_every: int = 10,
        samples: int = 1,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        self._initialize(params, options_of(locals()))

    def _moved(
        self, group: Group, p: Tensor, g: Tensor, diagonal: Tensor | None, state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        lr, gamma, eps, decay = map(as_number, (group[n] for n in ("lr", "gamma", "eps", "weight_decay")))
        beta1, beta2 = as_number(group["betas"])
        mean, hessian = (state[n] if n in state else torch.zeros_like(p) for n in ("mean", "hessian"))
        mean = beta1 * mean + (1 - beta1) * g
        if diagonal is not None:
            hessian = beta2 * hessian + (1 - beta2) * diagonal
        direction = (mean / torch.clamp(gamma * hessian, min=eps)).clamp(-1, 1)
        return (1 - lr * decay) * p - lr * direction, {"mean": mean, "hessian": hessian}


class SophiaG(SophiaH):
    r"""Optimize by Sophia-G: Sophia with the diagonal of the Gauss-Newton matrix, from labels drawn from the model.

    .. math:: h_t = \beta_2 h_{t-k} + (1 - \beta_2) \, B \, \hat g_t^2, \qquad
              \hat g_t = \frac{1}{B} \sum_{n=1}^{B} \nabla \ell_n(\hat y_n), \qquad \hat y_n \sim p(\cdot | x_n)

    and otherwise the equations of :class:`SophiaH`. The estimate is never negative, and costs one additional
    backward pass. The loss has to be computed inside the closure, or within ``with opt.recording():``. There,
    calls of ``F.cross_entropy``, ``F.mse_loss``, ``F.nll_loss``, ``F.gaussian_nll_loss``,
    ``F.binary_cross_entropy`` and ``F.binary_cross_entropy_with_logits`` (also by their modules) are
    recorded, with their weights in the total loss. Other parts of the loss, such as a penalty on the weights,
    do not enter the estimate.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate, as in :class:`SophiaH`.
        gamma: The factor of the diagonal, which decides how many elements are clipped.
        samples: Number of label samples for each estimate.
        **more: The other arguments of :class:`SophiaH`.

    Raises:
        ValueError: A hyperparameter is out of its range, or (in ``backward``) the loss contains no loss of known
            form.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import SophiaG
        >>> model = torch.nn.Linear(4, 3)
        >>> opt = SophiaG(model.parameters(), lr=0.1)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(torch.eye(4)), torch.tensor([0, 1, 2, 0]))
        ...     loss.backward()
        ...     return loss
        >>> losses = [float(opt.step(closure)) for _ in range(20)]
        >>> losses[-1] < losses[0] / 2
        True

    References:
        Liu, Li, Hall, Liang, Ma, "Sophia: a scalable stochastic second-order optimizer for language model
        pre-training", ICLR 2024, algorithms 2 and 3.
    """

    notes_losses = True
    differentiates_twice = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 4e-3,
        *,
        gamma: float | Tensor = 0.05,
        samples: int = 1,
        **more: Any,
    ) -> None:
        super().__init__(params, lr, gamma=gamma, samples=samples, **more)

    def _diagonal(
        self, samples: int, params: Sequence[Tensor], graph: BackwardPass, generators: Generators
    ) -> list[Tensor]:
        r"""Estimate the diagonal of the Gauss-Newton matrix by squared gradients for labels drawn from the model.

        Args:
            samples: Number of samples, over which the estimate is averaged.
            params: The parameters.
            graph: The backward pass, with its losses of known form.
            generators: Draw the labels.

        References:
            Liu et al., "Sophia", ICLR 2024, section 2.3; the identity is Bartlett's.
        """
        totals = [torch.zeros_like(widened(p)) for p in params]
        gradients = label_gradients(
            graph.losses, params, generators, samples, retain_graph=graph.retain_graph
        )
        for sign, found in gradients:
            for total, g in zip(totals, found, strict=True):
                if g is not None:  # in float32: in float16 the squares of small numbers are zero
                    total += sign * widened(g).square() / samples
        return totals
