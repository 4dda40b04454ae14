r"""Kronecker factors of a layer's Fisher matrix, and gradients multiplied with its inverse.

The weights of a layer are a matrix ``[outputs, inputs]``, a bias its last column. With :math:`a` the inputs and
:math:`g` the gradients of the outputs of an example, the gradient is :math:`g a^\top`, and the Fisher matrix is taken
to be :math:`\mathbb{E}[a a^\top] \otimes \mathbb{E}[g g^\top]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.distributed.shares import of_matrices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Factors(NamedTuple):
    """The two factors of a block of the Fisher matrix."""

    inputs: Tensor  # A, [*tasks, inputs, inputs]
    outputs: Tensor  # G, [*tasks, outputs, outputs]


class Sums(NamedTuple):
    """Sums over the rows of some examples, from which factors are made; those of two batches add up."""

    inputs: Tensor  # of a a^T, [*tasks, inputs, inputs]
    outputs: Tensor  # of g g^T, [*tasks, outputs, outputs]
    num_examples: int
    num_rows: int  # examples times positions


def sums_of(inputs: Tensor, gradients: Tensor) -> Sums:
    """Sum over the rows ``[*tasks, examples, positions, size]`` of inputs and output gradients, in each task."""
    a, g = inputs.flatten(-3, -2), gradients.flatten(-3, -2)
    return Sums(a.mT @ a, g.mT @ g, inputs.shape[-3], a.shape[-2])


def added(one: Sums | None, other: Sums) -> Sums:
    """Add the sums over two batches."""
    if one is None:
        return other
    num_examples, num_rows = one.num_examples + other.num_examples, one.num_rows + other.num_rows
    return Sums(one.inputs + other.inputs, one.outputs + other.outputs, num_examples, num_rows)


def factors_of(sums: Sums, weight: float | Tensor) -> Factors:
    r"""Return the factors of a layer.

    .. math:: A = \frac{1}{N} \sum_{n, t} a_{n t} a_{n t}^\top, \qquad
              G = \frac{w}{T} \sum_{n, t} g_{n t} g_{n t}^\top

    over N examples and T positions, of which a linear layer on vectors has one.

    Args:
        sums: Over all examples of a step.
        weight: The factor :math:`w`: N for the gradients of a mean over examples, which have a factor :math:`1 / N`
            each, so that :math:`w \sum_n g_n g_n^\top` is an average over examples; 1 for those of a sum.

    Example:
        >>> from metagrad.optim.kronecker.factors import factors_of, sums_of
        >>> sums = sums_of(torch.tensor([[[2.0]], [[4.0]]]), torch.tensor([[[0.5]], [[0.5]]]))
        >>> [float(factor) for factor in factors_of(sums, sums.num_examples)]
        [10.0, 1.0]

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015,
        section 3; Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers", ICML
        2016, theorem 1.
    """
    num_positions = sums.num_rows / sums.num_examples
    return Factors(sums.inputs / sums.num_examples, sums.outputs * (weight / num_positions))


def averaged_factors(old: Factors, new: Factors, count: int, decay: float | Tensor) -> Factors:
    r"""Return the running averages of the factors.

    .. math:: A_k = \epsilon_k A_{k-1} + (1 - \epsilon_k) A, \qquad \epsilon_k = \min(1 - 1 / k, \beta)

    Args:
        old: The averages before; not used at the first estimate.
        new: Those of the step.
        count: The number k of this estimate, from 1.
        decay: How much is kept, :math:`\beta`.

    Example:
        >>> from metagrad.optim.kronecker.factors import Factors, averaged_factors
        >>> old, new = (Factors(torch.tensor([[a]]), torch.tensor([[g]])) for a, g in ((1.0, 4.0), (3.0, 0.0)))
        >>> averaged_factors(old, new, 2, 0.95)
        Factors(inputs=tensor([[2.]]), outputs=tensor([[2.]]))

    References:
        Martens, Grosse, ICML 2015, section 5.
    """
    if count == 1:
        return new
    return Factors(*(averaged(*pair, count, decay) for pair in zip(old, new, strict=True)))


def averaged(old: Tensor, new: Tensor, count: int, decay: float | Tensor) -> Tensor:
    """Return the running average of which an estimate is the one of a number, from 1."""
    most = 1 - 1 / count
    if isinstance(decay, Tensor):
        return torch.lerp(new, old, decay.clamp(max=most).to(new))
    return torch.lerp(new, old, min(decay, most))


def split_damping(factors: Factors, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    r"""Split a damping into what is added to the eigenvalues of each factor.

    .. math:: \pi \sqrt{\gamma}, \quad \sqrt{\gamma} / \pi, \qquad
              \pi = \sqrt{\frac{\operatorname{tr}(A) / \dim A}{\operatorname{tr}(G) / \dim G}}

    which makes the smallest error under a trace norm. If a factor is zero, the ratio is 1.

    Example:
        >>> from metagrad.optim.kronecker.factors import Factors, split_damping
        >>> split_damping(Factors(4 * torch.eye(3), torch.eye(2)), 0.01)
        (tensor(0.2000), tensor(0.0500))

    References:
        Martens, Grosse, ICML 2015, section 6.3.
    """
    means = [factor.diagonal(dim1=-2, dim2=-1).mean(-1) for factor in factors]
    is_zero = (means[0] <= 0) | (means[1] <= 0)
    ratio = torch.where(is_zero, 1, means[0] / torch.where(is_zero, 1, means[1])).sqrt()
    return ratio * damping**0.5, damping**0.5 / ratio


def damped(factors: Factors, damping: float | Tensor) -> Factors:
    """Return the factors, each with its share of the damping."""
    shares = split_damping(factors, damping)
    return Factors(
        *(
            factor + share.to(factor.dtype)[..., None, None] * _eye(factor)
            for factor, share in zip(factors, shares, strict=True)
        )
    )


def inverse(matrix: Tensor) -> Tensor:
    """Return the inverse of a positive definite matrix.

    Raises:
        torch.linalg.LinAlgError: It is not: the damping is zero, or below the rounding errors of the factor.
    """
    return torch.cholesky_inverse(linalg.cholesky(matrix))


def kl_length(change: Tensor, kl_clip: float | Tensor) -> Tensor:
    r"""Return the factor of a direction that bounds the change of predictions.

    .. math:: \nu = \min\Bigl(1, \sqrt{\kappa / (\eta^2 D^\top \nabla)}\Bigr)

    Args:
        change: :math:`\eta^2 D^\top \nabla`, over all layers, ``[*tasks]``.
        kl_clip: The most, :math:`\kappa`.

    Example:
        >>> from metagrad.optim.kronecker.factors import kl_length
        >>> kl_length(torch.tensor([4.0, 0.5]), 1.0)
        tensor([0.5000, 1.0000])

    References:
        Ba, Grosse, Martens, "Distributed second-order optimization using Kronecker-factored approximations", ICLR
        2017, section 5.
    """
    # The root's derivative is infinite where nothing changes, and not wanted where nothing is too long.
    is_long = change > kl_clip
    return torch.where(is_long, (kl_clip / torch.where(is_long, change, 1)).sqrt(), 1)


def scaling_of(inputs: Tensor, gradients: Tensor, basis: Factors, max_elements: int = 2**22) -> Tensor:
    r"""Sum the squares of the examples' gradients in a basis.

    .. math:: S = \sum_n \bigl(Q_G^\top \nabla W_n \, Q_A\bigr)^2, \qquad \nabla W_n = \sum_t g_{n t} a_{n t}^\top

    which is the diagonal of :math:`\sum_n \operatorname{vec}(\nabla W_n) \operatorname{vec}(\nabla W_n)^\top` in that
    basis, and of all diagonals the nearest to it in Frobenius norm.

    Args:
        inputs: Rows ``[examples, positions, inputs]``.
        gradients: Rows ``[examples, positions, outputs]``.
        basis: The eigenvectors of both factors, as columns.
        max_elements: How many elements of the examples' gradients are held at a time.

    Returns:
        ``[outputs, inputs]``.

    References:
        George, Laurent, Bouthillier, Ballas, Vincent, "Fast approximate natural gradient descent in a
        Kronecker-factored eigenbasis", NeurIPS 2018, section 3.
    """
    a, g = inputs @ basis[0], gradients @ basis[1]
    if a.shape[1] == 1:
        return g.squeeze(1).square().mT @ a.squeeze(1).square()
    size = max(1, max_elements // (a.shape[-1] * g.shape[-1]))
    chunks = zip(a.split(size), g.split(size), strict=True)
    return torch.stack([(some_g.mT @ some_a).square().sum(0) for some_a, some_g in chunks]).sum(0)


class FactorEstimate(NamedTuple):
    """The estimate of a layer's block of the Fisher matrix from one step."""

    factors: Factors
    squares: Callable[[Factors], Tensor] | None = None  # second moments of gradients in a basis


class FisherBlock(NamedTuple):
    """The state of a layer's block of the Fisher matrix."""

    updates: int  # estimates of the factors so far
    inputs: Tensor  # the running averages of the factors
    outputs: Tensor
    input_inverse: Tensor  # of the factors as of the last time, damped
    output_inverse: Tensor

    @property
    def factors(self) -> Factors:
        """The running averages."""
        return Factors(self.inputs, self.outputs)

    @property
    def inverses(self) -> Factors:
        """The inverses of the damped factors."""
        return Factors(self.input_inverse, self.output_inverse)

    def estimated(self, new: FactorEstimate, decay: float | Tensor, *, is_due: bool) -> FisherBlock:
        """Return the block after an estimate of its factors; with the inverses of before."""
        factors = averaged_factors(self.factors, new.factors, self.updates + 1, decay)
        return FisherBlock(self.updates + 1, *factors, *self.inverses)

    def undecomposed(self, damping: float | Tensor) -> Factors:
        """Return the matrices of which :meth:`decomposed` is made."""
        return damped(self.factors, damping)

    decompose = staticmethod(inverse)
    """Decompose one of them."""

    def decomposed(self, new: FactorEstimate, matrices: Factors) -> FisherBlock:
        """Return the block with new inverses."""
        return FisherBlock(self.updates, *self.factors, *matrices)

    def direction(
        self, gradient: Tensor, damping: float | Tensor, *, has_bias: bool = False
    ) -> tuple[Tensor, ...]:
        """Multiply a gradient ``[*tasks, outputs, inputs]`` with the inverses, which are damped already.

        Returns:
            The product; with a bias, its last column apart.
        """
        return _product_by_parts(self.output_inverse @ gradient, self.input_inverse, has_bias)


class EigenBlock(NamedTuple):
    r"""A block in the basis of eigenvectors of its factors, with corrected eigenvalues S.

    .. math:: D = Q_G \, \frac{Q_G^\top \, \nabla W \, Q_A}{S + \gamma} \, Q_A^\top
    """

    updates: int
    inputs: Tensor
    outputs: Tensor
    input_basis: Tensor  # the eigenvectors of the factors as of the last time, as columns
    output_basis: Tensor
    scaling: Tensor = torch.zeros(())  # the running average of S in this basis, [outputs, inputs]

    @property
    def factors(self) -> Factors:
        """The running averages."""
        return Factors(self.inputs, self.outputs)

    def estimated(self, new: FactorEstimate, decay: float | Tensor, *, is_due: bool) -> EigenBlock:
        """Return the block after an estimate of its factors; and of S, where the basis is that of before."""
        assert new.squares is not None
        count, basis, scaling = self.updates + 1, Factors(self.input_basis, self.output_basis), self.scaling
        factors = averaged_factors(self.factors, new.factors, count, decay)
        if not is_due:
            scaling = averaged(scaling, new.squares(basis), count, decay)
        return EigenBlock(count, *factors, *basis, scaling)

    def undecomposed(self, damping: float | Tensor) -> Factors:
        """Return the matrices of which :meth:`decomposed` is made."""
        return self.factors

    @staticmethod
    def decompose(matrix: Tensor) -> Tensor:
        """Return the eigenvectors of one of them."""
        return linalg.eigh(matrix)[1]

    def decomposed(self, new: FactorEstimate, matrices: Factors) -> EigenBlock:
        """Return the block in a new basis."""
        assert new.squares is not None
        return EigenBlock(self.updates, *self.factors, *matrices, new.squares(matrices))

    def direction(
        self, gradient: Tensor, damping: float | Tensor, *, has_bias: bool = False
    ) -> tuple[Tensor, ...]:
        """Multiply a gradient ``[outputs, inputs]`` with the inverse; as for :class:`FisherBlock`."""
        turned = self.output_basis.mT @ gradient @ self.input_basis
        left = self.output_basis @ (turned / (self.scaling + damping))
        return _product_by_parts(left, self.input_basis.mT, has_bias)


Block: TypeAlias = "FisherBlock | EigenBlock"


def _product_by_parts(left: Tensor, right: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    """Multiply two matrices; what belongs to a bias apart, so that both parts are contiguous."""
    if not has_bias:
        return (left @ right,)
    return left @ right[..., :-1], (left @ right[..., -1:]).squeeze(-1)


def _eye(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def renewed(
    blocks: Mapping[str, Block],
    estimates: Iterable[tuple[str, FactorEstimate]],
    decay: float | Tensor,
    damping: float | Tensor,
    *,
    is_due: bool,
    group: ProcessGroup | None = None,
) -> dict[str, Block]:
    """Return blocks after estimates; with new inverses, or in a new basis, if these are due, and at the first.

    Args:
        blocks: By the names of weights.
        estimates: Of some of them.
        decay: How much of the running averages is kept.
        damping: What is added to the Fisher matrix.
        is_due: Whether inverses are.
        group: Processes that have the same estimates, of which each decomposes a share of the factors.
    """
    new_blocks, due = dict(blocks), {}
    for key, new in estimates:
        is_first = not blocks[key].updates
        new_blocks[key] = blocks[key].estimated(new, decay, is_due=is_due or is_first)
        if is_due or is_first:
            due[key] = new._replace(factors=new_blocks[key].factors)  # those of one step are freed
    matrices = [matrix for key in due for matrix in new_blocks[key].undecomposed(damping)]
    found = iter(_decomposed(matrices, type(next(iter(blocks.values()))).decompose, group) if due else ())
    for key, new in due.items():
        new_blocks[key] = new_blocks[key].decomposed(new, Factors(next(found), next(found)))
    return new_blocks


def _decomposed(
    matrices: Sequence[Tensor], decompose: Callable[[Tensor], Tensor], group: ProcessGroup | None
) -> Iterable[Tensor]:
    if group is None:
        return map(decompose, matrices)
    return of_matrices(
        "KFAC.step", lambda numbers: [decompose(matrices[n]) for n in numbers], matrices, group
    )
