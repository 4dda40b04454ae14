"""Newton's method and its relatives as optimizers of torch's kind."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.torch_optim.newton_optimizer import NewtonOptimizer
from metagrad.optim.torch_optim.optimizer import ParameterGroups


class NewtonCG(NewtonOptimizer):
    r"""Optimize by Newton's method with conjugate gradients: Hessian-free optimization.

    .. math:: (H_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \eta \, \alpha_t d_t

    with a damping that follows the ratio of reduction, a line search, and steps along negative curvature; see
    :func:`~metagrad.optim.newton.newton_cg.newton_cg`, whose steps these are, and
    :class:`~metagrad.optim.torch_optim.newton_optimizer.NewtonOptimizer` for the closure and ``opt.stats``.

    Args:
        params: Parameters, with names or without, or groups of them, which make one vector.
        lr: The factor :math:`\eta` of every step.
        damping: :math:`\lambda_0`; setting it in a group scales the damping that has been adapted.
        weight_decay: Of the loss with the penalty of half of it times the squared norm of the parameters.
        warm_start: Conjugate gradients begin at so much of their last solution.
        adapt: Look at the loss at the end of a step, for the damping and the length, which needs a closure.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        curvature_fraction: The part of the data whose curvature is taken, above 0: the closure is called as
            ``closure(fraction=...)`` for it. 1 takes the curvature of all data.
        curvature_every: Steps from one solve to the next; between, directions are those of limited-memory BFGS.
        pairs: How many pairs of a solve are kept for the steps up to the next.
        preconditioner: ``"diagonal"`` is Martens', by an estimate of the diagonal at each solve.
        exponent: Of that diagonal with its damping.
        samples: How many probes the estimate is the mean of.
        maximize: Climb.
        nonfinite: Where the loss, a gradient or the curvature is NaN or infinite, parameters and state stay as they
            are, and a step ``"raise"``s an error, or is left out (``"skip"``) and counted in ``opt.stats``.
        seed: Of the random numbers of the estimate; None takes ``torch.initial_seed()``.

    Raises:
        ValueError: A hyper-parameter is out of its range, or parameters of a group differ in dtype or device.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.newton import NewtonCG
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> opt = NewtonCG([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (torch.tensor([1.0, 100.0]) * (w - 3) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> float(opt.step(closure)), torch.allclose(w, torch.tensor(3.0)), opt.stats["direction"]
        (104.0, True, 'newton')

        Products with a quarter of the data, at every third step:

        >>> x = torch.sin(torch.arange(64.0))
        >>> w = torch.zeros(2, requires_grad=True)
        >>> opt = NewtonCG([w], curvature_fraction=0.25, curvature_every=3)
        >>> def closure(fraction=1.0):
        ...     opt.zero_grad()
        ...     part = x[: round(fraction * len(x))]
        ...     loss = ((w[0] * part + w[1] - (2 * part + 1)) ** 2).mean()
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(8):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.tensor([2.0, 1.0]), atol=1e-4), opt.stats["products"]
        (True, 0)

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
        weight_decay: float | Tensor = 0.0,
        warm_start: float | Tensor = 0.0,
        adapt: bool = True,
        change: float = 1.5,
        rtol: float = 1e-10,
        progress: float | None = 5e-4,
        max_steps: int = 250,
        curvature_fraction: float = 1.0,
        curvature_every: int = 1,
        pairs: int = 16,
        preconditioner: Literal["diagonal"] | None = None,
        exponent: float | Tensor = 0.75,
        samples: int = 8,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "damping": damping,
                "warm_start": warm_start,
                "adapt": adapt,
                "change": change,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "curvature_fraction": curvature_fraction,
                "curvature_every": curvature_every,
                "pairs": pairs,
                "preconditioner": preconditioner,
                "exponent": exponent,
                "samples": samples,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            seed=seed,
        )


class GaussNewton(NewtonOptimizer):
    r"""Optimize by the method of Levenberg and Marquardt, for losses whose curvature in the output is known.

    .. math:: (J_t^\top H_L J_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \eta \, \alpha_t d_t

    with a damping that follows the ratio of reduction, and a line search where a step would climb; see
    :func:`~metagrad.optim.newton.gauss_newton.gauss_newton`, whose steps these are. The loss is to be computed inside
    the closure, or within ``with opt.recording():``, where calls of ``F.mse_loss``, ``F.cross_entropy``,
    ``F.nll_loss``, ``F.gaussian_nll_loss``, ``F.binary_cross_entropy`` and ``F.binary_cross_entropy_with_logits``
    (also by their modules) are noted. Residuals ``r`` are ``F.mse_loss(r, torch.zeros_like(r))``, a likelihood
    written by hand is :meth:`output_loss`, and :func:`metagrad.optim.least_squares` fits residuals without a loop.
    What else the loss contains, such as a penalty, is in the gradient alone.

    Args:
        params: Parameters, with names or without, or groups of them, which make one vector.
        lr: The factor :math:`\eta` of every step.
        damping: :math:`\lambda_0`; setting it in a group scales the damping that has been adapted.
        weight_decay: Of the loss with the penalty of half of it times the squared norm of the parameters.
        warm_start: Conjugate gradients begin at so much of their last solution.
        adapt: Look at the loss at the end of a step, for the damping and the length, which needs a closure.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        curvature_fraction: The part of the data whose curvature is taken, above 0: the closure is called as
            ``closure(fraction=...)`` for it. 1 takes the curvature of all data.
        curvature_every: Steps from one solve to the next; between, directions are those of limited-memory BFGS.
        pairs: How many pairs of a solve are kept for the steps up to the next.
        preconditioner: ``"diagonal"`` is Martens', by an estimate of the diagonal at each solve.
        exponent: Of that diagonal with its damping.
        samples: How many draws of the labels the estimate is the mean of.
        maximize: Climb, where the loss is the negative of one of known form.
        seed: Of the random numbers of the estimate; None takes ``torch.initial_seed()``.

    Raises:
        ValueError: A hyper-parameter is out of its range, or parameters of a group differ in dtype or device; in a
            step, the loss contains none of known form.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim.torch_optim.newton import GaussNewton
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
    differentiates_gradients = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        damping: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.0,
        warm_start: float | Tensor = 0.0,
        adapt: bool = True,
        change: float = 3.0,
        rtol: float = 1e-10,
        progress: float | None = 5e-4,
        max_steps: int = 250,
        curvature_fraction: float = 1.0,
        curvature_every: int = 1,
        pairs: int = 16,
        preconditioner: Literal["diagonal"] | None = None,
        exponent: float | Tensor = 0.75,
        samples: int = 8,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "damping": damping,
                "warm_start": warm_start,
                "adapt": adapt,
                "change": change,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "curvature_fraction": curvature_fraction,
                "curvature_every": curvature_every,
                "pairs": pairs,
                "preconditioner": preconditioner,
                "exponent": exponent,
                "samples": samples,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            seed=seed,
        )


class NaturalGradient(NewtonOptimizer):
    r"""Optimize by natural gradient descent, with the exact Fisher matrix.

    .. math:: (F_t + \lambda I) \, d_t \approx -g_t, \qquad
        w_t = w_{t-1} + \alpha_t \min\Bigl(\eta, \sqrt{2 \delta / d_t^\top F_t d_t}\Bigr) \, d_t

    with a damping that follows the ratio of reduction, and a line search where a step would climb; see
    :func:`~metagrad.optim.newton.natural_gradient.natural_gradient`, whose steps these are. The loss is to be
    computed as for :class:`GaussNewton`: it is the likelihood.

    Args:
        params: Parameters, with names or without, or groups of them, which make one vector.
        lr: The step size :math:`\eta`.
        damping: :math:`\lambda_0`; setting it in a group scales the damping that has been adapted.
        weight_decay: Of the loss with the penalty of half of it times the squared norm of the parameters.
        max_divergence: The bound :math:`\delta` of the divergence of predictions; None bounds nothing.
        warm_start: Conjugate gradients begin at so much of their last solution.
        adapt: Look at the loss at the end of a step, for the damping and the length, which needs a closure.
        change: The factor of the damping, above 1.
        rtol: Conjugate gradients end at this residual, relative to the gradient.
        progress: They end when the model falls by less than this for each step (Martens' rule); None never does.
        max_steps: The most steps of conjugate gradients.
        curvature_fraction: The part of the data whose curvature is taken, above 0: the closure is called as
            ``closure(fraction=...)`` for it. 1 takes the curvature of all data.
        curvature_every: Steps from one solve to the next; between, directions are those of limited-memory BFGS.
        pairs: How many pairs of a solve are kept for the steps up to the next.
        preconditioner: ``"diagonal"`` is Martens', by an estimate of the diagonal at each solve.
        exponent: Of that diagonal with its damping.
        samples: How many draws of the labels the estimate is the mean of.
        maximize: Climb; the metric is the same.
        seed: Of the random numbers of the estimate; None takes ``torch.initial_seed()``.

    Raises:
        ValueError: As for :class:`GaussNewton`.
        TypeError: As for :class:`GaussNewton`.

    Example:
        >>> from metagrad.optim.torch_optim.newton import NaturalGradient
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
    differentiates_gradients = False
    whole = "natural_gradient"
    adapted = "damping"

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        damping: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.0,
        max_divergence: float | Tensor | None = None,
        warm_start: float | Tensor = 0.0,
        adapt: bool = True,
        change: float = 3.0,
        rtol: float = 1e-10,
        progress: float | None = 5e-4,
        max_steps: int = 250,
        curvature_fraction: float = 1.0,
        curvature_every: int = 1,
        pairs: int = 16,
        preconditioner: Literal["diagonal"] | None = None,
        exponent: float | Tensor = 0.75,
        samples: int = 8,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "damping": damping,
                "max_divergence": max_divergence,
                "warm_start": warm_start,
                "adapt": adapt,
                "change": change,
                "rtol": rtol,
                "progress": progress,
                "max_steps": max_steps,
                "curvature_fraction": curvature_fraction,
                "curvature_every": curvature_every,
                "pairs": pairs,
                "preconditioner": preconditioner,
                "exponent": exponent,
                "samples": samples,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
            seed=seed,
        )
