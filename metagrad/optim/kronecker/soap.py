"""SOAP: Adam in the eigenbasis of Shampoo's matrices."""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_count
from metagrad.core.tree import Params
from metagrad.optim.arithmetic import average, plus_scaled, root
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.kronecker.matrix_roots import eigenvectors
from metagrad.optim.kronecker.per_axis import AxisMatrices, axis_gram, chosen, products_along
from metagrad.optim.per_parameter import Values
from metagrad.optim.rule import Hyperparameter, functional_optimizer, hyperparameter
from metagrad.optim.torch_optim.optimizer import RuleOptimizer

Matrices = tuple[Tensor, ...]


class SOAPState(NamedTuple):
    """The state of :class:`SOAPRule`.

    Attributes:
        step: Steps taken.
        mean: Averages of the gradients, in the shapes and the coordinates of the parameters.
        square: Averages of the squares of the gradients, in the coordinates of the bases.
        statistics: For each axis with a basis, the average of the products of gradients along it.
        bases: Approximate eigenvectors of the statistics. Each update is one step of QR iteration.
    """

    step: int
    mean: Params
    square: Params
    statistics: dict[str, Matrices]
    bases: dict[str, Matrices]


@functional_optimizer
class SOAPRule(AxisMatrices):
    r"""The functional form of SOAP.

    .. math::
        L_t &= \beta_2 L_{t-1} + (1 - \beta_2) G_t G_t^\top, \qquad
        R_t = \beta_2 R_{t-1} + (1 - \beta_2) G_t^\top G_t \\
        M_t &= \beta_1 M_{t-1} + (1 - \beta_1) G_t, \qquad
        V_t = \beta_2 V_{t-1} + (1 - \beta_2) (Q_L^\top G_t Q_R)^2 \\
        W_t &= (1 - \eta \lambda) W_{t-1} - \eta \, Q_L \,
               \frac{Q_L^\top M_t Q_R / (1 - \beta_1^t)}{\sqrt{V_t / (1 - \beta_2^t)} + \epsilon} \, Q_R^\top

    and every ``basis_every`` steps :math:`Q_L \leftarrow \mathrm{qr}(L_t Q_L)`, and similarly for :math:`Q_R`.
    Before each update, the columns of the bases and :math:`V` are sorted by :math:`q^\top L_t q`. The first bases
    are eigenvectors for the gradient of the first step. The paper's code skips the first step, but this optimizer
    takes it. :math:`M` is stored in the parameter's own coordinates, so a new basis does not change it.

    The bases are inexact by rounding and by ``shift``. An estimate of the resulting error of each component of the
    gradient is added to :math:`V`. So a component that is zero in exact arithmetic, as in the null space of the
    statistics, takes nearly no step. Components that are not well above this error take shorter steps than in the
    paper. In float32 these are components with singular values below about a thousandth of the largest singular
    value.

    A tensor of k axes has k bases. Scalars, and vectors unless ``precondition_1d``, are updated as by AdamW. The rule
    is differentiable, also through the bases.

    These arguments take every form of :data:`Hyperparameter`, and may require grad: lr, betas, eps, weight_decay,
    shift.

    Args:
        lr: The learning rate :math:`\eta`. The paper uses 3e-3, for language models of 360 million parameters and
            more.
        betas: Decay rates of the average gradient, and of the averages of squares and statistics.
        eps: Added to the square root in the denominator.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        shift: Before the bases are computed, this share of the mean eigenvalue is added to the diagonal of the
            statistics. Bases are then a smooth function of the statistics, even if these are rank-deficient. The
            paper uses 0. The relative error of derivatives is about the machine precision divided by ``shift``.
            Derivatives in float32 raise an error below 6e-5.
        basis_every: Steps from one iteration of the bases to the next.
        max_size: Longer axes have no basis.
        precondition_1d: If True, vectors also have a basis.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.

    Example:
        The first step is Adam's in the eigenbasis: singular values become 1.

        >>> from metagrad.optim.kronecker.soap import soap
        >>> rule = soap(lr=1.0, weight_decay=0.0)
        >>> params = {"w": torch.zeros(2, 2)}
        >>> new, state = rule.update({"w": torch.tensor([[0.0, 4.0], [9.0, 0.0]])}, rule.init(params), params)
        >>> new["w"].round(decimals=4) + 0.0
        tensor([[ 0., -1.],
                [-1.,  0.]])

    References:
        Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson, Kakade, "SOAP: improving and stabilizing Shampoo
        using Adam", arXiv:2409.11321, algorithms 3 and 4.
    """

    lr: Hyperparameter = hyperparameter(default=1e-2)
    _: KW_ONLY
    betas: tuple[Hyperparameter, Hyperparameter] = hyperparameter(default=(0.95, 0.95), below=1.0)
    eps: Hyperparameter = hyperparameter(default=1e-8)
    weight_decay: Hyperparameter = hyperparameter(default=0.01)
    shift: Hyperparameter = hyperparameter(default=1e-6)
    basis_every: int = 10
    max_size: int = 10000
    precondition_1d: bool = False
    maximize: bool = False
    batch_ndim: int = 0

    call, State = "soap(...)", SOAPState

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("basis_every", "max_size"):
            check_count(f"soap(..., {name})", getattr(self, name))

    def init_slots(self, param: Tensor) -> tuple[Tensor | Matrices, ...]:
        """Return averages of zero, and the parameter's own coordinates as bases."""
        axes = self.axes_of(param)
        sizes = [axes[axis] for axis in self._turned(axes)]
        zeros = torch.zeros_like(param)
        return zeros, zeros, self.identities(param, sizes, 0.0), self.identities(param, sizes)

    def update_param(
        self,
        h: Values,
        step: float | Tensor,
        w: Tensor,
        g: Tensor,
        mean: Tensor,
        square: Tensor,
        statistics: Matrices,
        bases: Matrices,
    ) -> tuple[Tensor | Matrices, ...]:
        """Return a parameter and its state after one step."""
        value, second = self.in_axes(g), self.in_axes(square)
        turned = self._turned(self.axes_of(g))
        if turned:
            self.refuse_elements(**{"betas[1]": h.beta2, "eps": h.eps, "shift": h.shift})
            self._check_shift(g)
        grams = [axis_gram(value, axis, self.batch_ndim) for axis in turned]
        statistics = tuple(average(old, h.beta2, gram) for old, gram in zip(statistics, grams, strict=True))
        bases = chosen(step == 0, lambda: tuple(first_basis(matrix, h.shift) for matrix in statistics), bases)
        mean = average(mean, h.beta1, g).to(g.dtype)
        second = average(second, h.beta2, self._turned_by(value, turned, bases) ** 2)
        steps = step + 1
        known = second + self._errors(second, turned, h.shift) if turned else second
        scale = root(known) / (1 - h.beta2**steps) ** 0.5 + h.eps
        first = self._turned_by(self.in_axes(mean), turned, bases) / scale
        direction = self._turned_by(first, turned, tuple(basis.mT for basis in bases))
        if is_used(h.weight_decay):
            w = w * (1 - h.lr * h.weight_decay)
        direction = direction.reshape(w.shape).to(w.dtype)
        new = plus_scaled(w, h.lr / (1 - h.beta1**steps), direction, sign=-1)
        is_due = (step % self.basis_every == 0) & (step > 0)
        second, *rest = chosen(
            is_due, lambda: self._turned_on(second, turned, statistics, bases, h.shift), (second, *bases)
        )
        return new, mean, second.reshape(square.shape), statistics, tuple(rest)

    def _check_shift(self, g: Tensor) -> None:
        """Raise ``ValueError`` if a derivative through the bases is dominated by rounding."""
        shift, dtype = self.shift, torch.promote_types(g.dtype, torch.float32)
        is_differentiated = g.requires_grad and torch.is_grad_enabled()
        if not isinstance(shift, (int, float)) or not is_differentiated or dtype == torch.float64:
            return
        if torch.finfo(dtype).eps > 2e-3 * shift:
            raise ValueError(
                f"soap(...).update: this step is differentiated in {dtype}, where shift={shift:g} makes derivatives "
                "wrong by several percent. Use shift=1e-3, or float64."
            )

    def _errors(self, second: Tensor, turned: list[int], shift: float | Tensor) -> Tensor:
        """Return the squares of the errors that inexact bases make in the components of a gradient.

        The error of a basis consists of the rounding error and the shift of its matrix, relative to an
        eigenvalue. The error mixes components, so a component of zero would take a step as long as the other
        components.
        """
        own = range(self.batch_ndim, second.ndim)
        others = [[a for a in own if a != self.batch_ndim + axis] for axis in turned]
        energies = [second.sum(each, keepdim=True) if each else second for each in others]
        largest = torch.stack([e.amax(tuple(own), keepdim=True) for e in energies]).amax(0)
        mean = torch.stack([e.mean(tuple(own), keepdim=True) for e in energies]).amax(0)
        error = 10 * (torch.finfo(second.dtype).eps * largest + shift * mean)
        eigenvalue = functools.reduce(torch.maximum, energies).maximum(error)
        return error * (error / torch.where(error > 0, eigenvalue, 1))

    def _turned(self, axes: tuple[int, ...]) -> list[int]:
        """Return the axes that have a basis."""
        if len(axes) == 1 and not self.precondition_1d:
            return []
        return [axis for axis, size in enumerate(axes) if size <= self.max_size]

    def _turned_by(self, value: Tensor, axes: list[int], bases: Matrices) -> Tensor:
        return products_along(value, zip(axes, bases, strict=True), self.batch_ndim)

    def _turned_on(
        self, second: Tensor, axes: list[int], statistics: Matrices, bases: Matrices, shift: float | Tensor
    ) -> tuple[Tensor, ...]:
        """Take a step of the power iteration. Return the reordered second moment and the new bases."""
        new: list[Tensor] = []
        for axis, matrix, basis in zip(axes, statistics, bases, strict=True):
            order = by_curvature(matrix, basis)
            second = self._ordered(second, axis, order)
            new.append(iterated(matrix, torch.take_along_dim(basis, order.unsqueeze(-2), -1), shift))
        return second, *new

    def _ordered(self, value: Tensor, axis: int, order: Tensor) -> Tensor:
        last = value.movedim(self.batch_ndim + axis, -1)
        num_others = last.ndim - order.ndim
        at = order.reshape(*order.shape[:-1], *[1] * num_others, order.shape[-1])
        return torch.take_along_dim(last, at, -1).movedim(-1, self.batch_ndim + axis)


soap = SOAPRule


def first_basis(matrix: Tensor, shift: float | Tensor) -> Tensor:
    r"""Compute the eigenvectors of ``A + s diag(0, 1/n, 2/n, ...)``, with ``s`` the mean eigenvalue times ``shift``.

    If A is rank-deficient, its null space has many bases, and a decomposition returns an arbitrary basis. The second
    term, however small, selects a basis that depends smoothly on A.
    """
    n = matrix.shape[-1]
    ramp = torch.arange(n, dtype=matrix.dtype, device=matrix.device) / n
    return eigenvectors(matrix + shift * _mean_eigenvalue(matrix) * torch.diag(ramp))


def by_curvature(matrix: Tensor, basis: Tensor) -> Tensor:
    """Return the order of the columns of a basis in which :math:`q^T A q` descends."""
    quotients = torch.einsum("...ij,...ij->...j", basis, matrix @ basis)
    return quotients.detach().argsort(dim=-1, descending=True, stable=True)


def iterated(matrix: Tensor, basis: Tensor, shift: float | Tensor) -> Tensor:
    r"""Take a step of the power iteration, ``qr((A + s I) Q)``, with s the share ``shift`` of the mean eigenvalue.

    ``A + s I`` has the same eigenvectors as A. The columns of ``(A + s I) Q`` are independent even if A is singular.
    Without the shift, the derivative would then be infinite.
    """
    mean = _mean_eigenvalue(matrix)
    shifted = matrix @ basis + shift * mean * basis
    return linalg.qr(torch.where(mean == 0, basis, shifted))[0]


def _mean_eigenvalue(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]


class SOAP(RuleOptimizer, rule=SOAPRule):
    r"""Optimize by SOAP: Adam in the eigenbasis of Shampoo's matrices.

    .. math:: W_t = (1 - \eta \lambda) W_{t-1} - \eta \, Q_L \, \mathrm{Adam}(Q_L^\top G Q_R) \, Q_R^\top

    Sparse gradients raise an error.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`. The paper uses 3e-3, for language models of 360 million parameters and
            more.
        betas: Decay rates of the average gradient, and of the averages of squares and statistics.
        eps: Added to the square root in the denominator.
        weight_decay: Decoupled weight decay :math:`\lambda`: each step subtracts :math:`\eta \lambda w`.
        shift: Before the bases are computed, this share of the mean eigenvalue is added to the diagonal of the
            statistics. Bases are then a smooth function of the statistics, even if these are rank-deficient. The
            paper uses 0. The relative error of derivatives is about the machine precision divided by ``shift``.
            Derivatives in float32 raise an error below 6e-5.
        basis_every: Steps from one iteration of the bases to the next.
        max_size: Longer axes have no basis.
        precondition_1d: If True, vectors also have a basis.
        maximize: Maximize the loss: negate the gradient. Weight decay keeps its sign.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be
            factorized. ``"raise"`` raises an error. ``"skip"`` leaves the step out and counts it in ``opt.stats``.
            Parameters and state do not change.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import SOAP
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
