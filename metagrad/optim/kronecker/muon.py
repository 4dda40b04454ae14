"""Muon: momentum whose matrix is made nearly orthogonal, for the weights of hidden layers."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.core.checks import check_choice, check_count, is_sequence, refuse
from metagrad.core.tree import Params
from metagrad.optim.arithmetic import average, matrix_norm, plus_scaled
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.kronecker.per_axis import AxisMatrices
from metagrad.optim.per_parameter import Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter
from metagrad.optim.torch_optim.optimizer import RuleOptimizer


class MuonState(NamedTuple):
    """The state of :class:`MuonRule`.

    Attributes:
        step: Steps taken.
        momentum: Averages of the gradients, in the shapes of the parameters.
    """

    step: int
    momentum: Params


@functional_optimizer
class MuonRule(AxisMatrices):
    r"""The functional form of Muon. With ``ns_dtype=torch.bfloat16`` it takes the steps of ``torch.optim.Muon``.

    .. math::
        m_t &= \mu m_{t-1} + (1 - \mu) g_t, \qquad d_t = \mu m_t + (1 - \mu) g_t \text{ if nesterov, else } m_t \\
        w_t &= (1 - \eta \lambda) \, w_{t-1} - \eta \kappa \, \mathrm{NS}(d_t)

    :math:`\mathrm{NS}` iterates a polynomial. It maps all singular values of a matrix to values between about 0.7
    and 1.2. :math:`\kappa` depends on the shape. The optimizer accepts only matrices. :func:`mask` gives biases,
    embeddings and the last layer another rule. If tasks are stacked, every task has its own matrices.

    A gradient of exactly zero gives a step of zero, and is differentiable. torch's optimizer iterates in bfloat16,
    where a step has 3 correct digits and its derivatives may have no correct digit. So a step that is differentiated
    must iterate in the dtype of the parameters.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, weight_decay, momentum, eps.

    Args:
        lr: The learning rate :math:`\eta`.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        momentum: Decay rate :math:`\mu` of the average gradient.
        nesterov: Look ahead along the new average.
        ns_coefficients: Coefficients of :math:`X`, :math:`X X^\top X` and :math:`(X X^\top)^2 X` in an iteration.
        eps: Lower bound of the norm that scales a matrix before the iterations.
        ns_steps: Number of iterations.
        adjust_lr_fn: The factor :math:`\kappa` for a matrix ``[m, n]``. With ``"original"`` or None, it is
            :math:`\sqrt{\max(1, m / n)}`. With ``"match_rms_adamw"``, it is
            :math:`0.2 \sqrt{\max(m, n)}`, for which Adam's ``lr`` fits.
        ns_dtype: Dtype of iterations. None means the parameter's dtype, or float32 for half precision. Use a narrower
            dtype only for steps that are not differentiated.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.

    Raises:
        ValueError: ``adjust_lr_fn`` is unknown, ``ns_steps`` is negative, or the coefficients are not three
            numbers. ``init`` raises it for a parameter that is not a matrix.

    Example:
        Two iterations by Newton's polynomial of third order, (3 s - s**3) / 2, on the singular values 0.8 and 0.6:

        >>> rule = metagrad.optim.rules.muon(
        ...     lr=1.0, weight_decay=0.0, ns_coefficients=(1.5, -0.5, 0.0), ns_steps=2, ns_dtype=None)
        >>> params = {"w": torch.zeros(2, 2)}
        >>> new, state = rule.update({"w": torch.tensor([[4.0, 0.0], [0.0, 3.0]])}, rule.init(params), params)
        >>> new["w"]
        tensor([[-0.9954,  0.0000],
                [ 0.0000, -0.9396]])

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024,
        https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is scalable for LLM training",
        arXiv:2502.16982, equation 4 (``"match_rms_adamw"``).
    """

    lr: Hyperparameter = hyperparameter(default=1e-3)
    _: KW_ONLY
    weight_decay: Hyperparameter = hyperparameter(default=0.1)
    momentum: Hyperparameter = hyperparameter(default=0.95)
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: Hyperparameter = hyperparameter(default=1e-7)
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    ns_dtype: torch.dtype | None = None
    maximize: bool = False
    batch_ndim: int = 0

    call, State = "muon(...)", MuonState

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("muon(..., adjust_lr_fn)", self.adjust_lr_fn, (None, "original", "match_rms_adamw"))
        check_count("muon(..., ns_steps)", self.ns_steps, least=0)
        if not is_sequence(self.ns_coefficients) or len(self.ns_coefficients) != 3:
            refuse("muon(..., ns_coefficients)", "three numbers", self.ns_coefficients)

    def check(self, key: str, param: Tensor) -> None:
        """Raise an error unless a parameter is a matrix."""
        super().check(key, param)
        shape = tuple(param.shape[self.batch_ndim :])
        if len(shape) != 2:
            raise ValueError(
                f"muon(...).init: {key!r} must be a matrix, got shape {shape}. Give other parameters to another "
                "optimizer, or a rule of their own: mask(muon(...), ['*.weight'], other=adamw(...))."
            )

    def init_slots(self, param: Tensor) -> tuple[Tensor]:
        """Return a momentum of zeros."""
        return (torch.zeros_like(param),)

    def update_param(
        self, h: Values, step: float | Tensor, w: Tensor, g: Tensor, velocity: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return a parameter and its momentum after one step."""
        self.refuse_elements(eps=h.eps)
        self._check_dtype(w, g)
        velocity = average(velocity, h.momentum, g)
        direction = average(velocity, h.momentum, g) if self.nesterov else velocity
        matrices = direction.reshape(-1, *w.shape[-2:]) if self.batch_ndim else direction
        matrices = matrices.to(self.ns_dtype or w.dtype)
        matrices = orthogonalized(matrices, self.ns_coefficients, self.ns_steps, h.eps)
        if is_used(h.weight_decay):
            w = w * (1 - h.lr * h.weight_decay)
        direction = matrices.to(w.dtype).reshape(w.shape)
        return plus_scaled(w, h.lr * self._adjustment(*w.shape[-2:]), direction, sign=-1), velocity

    def _check_dtype(self, w: Tensor, g: Tensor) -> None:
        dtype = self.ns_dtype or w.dtype
        if g.requires_grad and torch.is_grad_enabled() and torch.finfo(dtype).eps > torch.finfo(w.dtype).eps:
            raise ValueError(
                f"muon(...).update: ns_dtype={dtype} rounds the iterations, whose derivatives are wrong then, and "
                f"this step is differentiated. Use ns_dtype=None, which is {w.dtype} here."
            )

    def _adjustment(self, num_rows: int, num_columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(num_rows, num_columns))
        return math.sqrt(max(1.0, num_rows / num_columns))


muon = MuonRule


def orthogonalized(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float | Tensor
) -> Tensor:
    r"""Bring all singular values of ``[m, n]`` or ``[tasks, m, n]`` near 1, by Newton-Schulz iterations.

    .. math:: X \leftarrow a X + (b X X^\top + c \, (X X^\top)^2) X, \qquad X_0 = G / \max(\|G\|_F, \epsilon)
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / matrix_norm(x).clamp(min=eps).to(x.dtype)
    (a, b, c), plus_product = coefficients, torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = plus_product(x, plus_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon(RuleOptimizer, rule=MuonRule, ns_dtype=torch.bfloat16):
    r"""Optimize matrices by Muon: momentum, made nearly orthogonal by Newton-Schulz iterations.

    .. math:: w_t = (1 - \eta \lambda) w_{t-1} - \eta \, c \, \mathrm{NS}(m_t)

    Muon is for the weights of hidden layers. Every parameter must be a matrix. Embeddings, biases and output layers
    need another optimizer.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        momentum: Decay rate :math:`\mu` of the average gradient.
        nesterov: Look ahead along the new average.
        ns_coefficients: Coefficients of :math:`X`, :math:`X X^\top X` and :math:`(X X^\top)^2 X` in an iteration.
        eps: Lower bound of the norm that scales a matrix before the iterations.
        ns_steps: Number of iterations.
        adjust_lr_fn: The factor :math:`\kappa` for a matrix ``[m, n]``. With ``"original"`` or None, it is
            :math:`\sqrt{\max(1, m / n)}`. With ``"match_rms_adamw"``, it is
            :math:`0.2 \sqrt{\max(m, n)}`, for which Adam's ``lr`` fits.
        ns_dtype: Dtype of iterations. None means the parameter's dtype, or float32 for half precision. Use a narrower
            dtype only for steps that are not differentiated.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be
            factorized. ``"raise"`` raises an error. ``"skip"`` leaves the step out and counts it in ``opt.stats``.
            Parameters and state do not change.

    Raises:
        ValueError: A parameter is not a matrix, or a hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import Muon
        >>> model = torch.nn.Linear(3, 3, bias=False)
        >>> opt = Muon(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 3)).square().sum().backward()
        >>> opt.step()

    References:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is scalable
        for LLM training", arXiv:2502.16982, section 2.2.
    """
