"""Sophia as optimizers of torch's kind."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from metagrad.optim.diagonal.sophia import sophia_g, sophia_h
from metagrad.optim.torch_optim.diagonal_optimizer import DiagonalOptimizer
from metagrad.optim.torch_optim.optimizer import ParameterGroups


class SophiaH(DiagonalOptimizer):
    r"""Optimize by Sophia-H: a momentum divided by the Hessian's diagonal, clipped element by element.

    .. math:: w_t = (1 - \eta \lambda) w_{t-1}
                    - \eta \, \operatorname{clip}\bigl(m_t / \max(\gamma h_t, \epsilon), 1\bigr)

    with :math:`h` the average of :math:`u \odot H u` at every ``curvature_every``-th step; see
    :func:`~metagrad.optim.diagonal.sophia.sophia_h`, whose steps these are. A closure of the usual form works, or
    ``opt.backward(loss)`` in place of ``loss.backward()``, also with a ``GradScaler``; what does not work is said of
    :class:`~metagrad.optim.torch_optim.curvature_optimizer.CurvatureOptimizer`. The steps between two estimates cost
    a gradient.

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`; no element moves by more. In the paper 2e-4 to 6e-4, for language models of
            125 million parameters and more.
        betas: How much of the averages of gradients and of diagonals is kept, each from 0 to below 1.
        gamma: The factor of the diagonal, which decides how many elements are clipped.
        eps: The least that a momentum is divided by; above 0.
        weight_decay: The factor :math:`\lambda` of the step :math:`\eta \lambda w` that shrinks the parameters.
        curvature_every: Steps from one estimate to the next; the first step makes one.
        samples: Probes for each estimate.
        foreach: Move parameters as one long vector; None does so for small ones.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.
        seed: Of the probes; None takes ``torch.initial_seed()``.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.sophia import SophiaH
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

    make_rule = staticmethod(sophia_h)

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 4e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.96, 0.99),
        gamma: float | Tensor = 0.01,
        eps: float | Tensor = 1e-12,
        weight_decay: float | Tensor = 0.0,
        *,
        curvature_every: int = 10,
        samples: int = 1,
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
                "gamma": gamma,
                "eps": eps,
                "weight_decay": weight_decay,
                "curvature_every": curvature_every,
                "samples": samples,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            foreach=foreach,
            seed=seed,
        )


class SophiaG(SophiaH):
    r"""Optimize by Sophia-G: Sophia with the diagonal of the Gauss-Newton matrix, from labels drawn from the model.

    .. math:: h_t = \beta_2 h_{t-k} + (1 - \beta_2) \, B \, \hat g_t^2, \qquad
              \hat g_t = \frac{1}{B} \sum_{n=1}^{B} \nabla \ell_n(\hat y_n), \qquad \hat y_n \sim p(\cdot | x_n)

    see :func:`~metagrad.optim.diagonal.sophia.sophia_g`. An estimate costs one backward pass more. The loss is to be
    computed inside the closure, or within ``with opt.recording():``, where calls of ``F.cross_entropy``,
    ``F.mse_loss``, ``F.nll_loss``, ``F.gaussian_nll_loss``, ``F.binary_cross_entropy`` and
    ``F.binary_cross_entropy_with_logits`` (also by their modules) are noted, with their weights in the whole. What
    else the loss contains, such as a penalty on the weights, does not enter the estimate.

    Args:
        params: Parameters, with names or without, or groups of them.
        lr: The step size :math:`\eta`; no element moves by more. In the paper 2e-4 to 6e-4, for language models of
            125 million parameters and more.
        betas: How much of the averages of gradients and of diagonals is kept, each from 0 to below 1.
        gamma: The factor of the diagonal, which decides how many elements are clipped.
        eps: The least that a momentum is divided by; above 0.
        weight_decay: The factor of the step that shrinks the parameters.
        curvature_every: Steps from one estimate to the next; the first step makes one.
        samples: Draws of the labels for each estimate.
        foreach: Move parameters as one long vector; None does so for small ones.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.
        seed: Of the drawn labels; None takes ``torch.initial_seed()``.

    Raises:
        ValueError: A hyper-parameter is out of its range; in ``backward``, the loss contains none of known form.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.sophia import SophiaG
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

    make_rule = staticmethod(sophia_g)
    notes_losses = True
    differentiates_twice = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 4e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.96, 0.99),
        gamma: float | Tensor = 0.05,
        eps: float | Tensor = 1e-12,
        weight_decay: float | Tensor = 0.0,
        *,
        curvature_every: int = 10,
        samples: int = 1,
        foreach: bool | None = None,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            gamma,
            eps,
            weight_decay,
            curvature_every=curvature_every,
            samples=samples,
            maximize=maximize,
            nonfinite=nonfinite,
            foreach=foreach,
            seed=seed,
        )
