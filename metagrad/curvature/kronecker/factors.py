r"""Kronecker factors of a layer's Fisher matrix, and gradients multiplied with its inverse.

The weights of a layer are a matrix ``[outputs, inputs]``, a bias its last column. An example has the inputs :math:`a`
and the gradients of the outputs :math:`g`. Its gradient is :math:`g a^\top`. The Fisher matrix is approximated by
:math:`\mathbb{E}[a a^\top] \otimes \mathbb{E}[g g^\top]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.core._torch import linalg

LARGEST_IN_DOUBLE = 2048
"""Size of the largest matrix that is factorized in float64. In float32, ill-conditioned factors may fail."""


class Factors(NamedTuple):
    """A pair of matrices for a layer: the Kronecker factors, or matrices computed from the factors."""

    inputs: Tensor  # A, [inputs, inputs]
    outputs: Tensor  # G, [outputs, outputs]


class Sums(NamedTuple):
    """Sums over the rows of some examples, which determine the factors. The sums of two batches can be added."""

    inputs: Any  # sum of a a^T, [inputs, inputs]
    outputs: Any  # sum of g g^T, [outputs, outputs]
    num_examples: int
    num_rows: int  # examples times positions

    def plus(self, calls: Iterable[tuple[Tensor, Tensor]]) -> Sums:
        """Add the rows ``[examples, positions, size]`` of the inputs and output gradients of some calls."""
        inputs, outputs, examples, rows = self
        for of_inputs, of_outputs in calls:
            a, g = of_inputs.flatten(0, 1), of_outputs.flatten(0, 1)
            inputs, outputs = inputs + a.mT @ a, outputs + g.mT @ g
            examples, rows = examples + len(of_inputs), rows + len(a)
        return Sums(inputs, outputs, examples, rows)


NO_SUMS = Sums(0.0, 0.0, 0, 0)


def split_damping(factors: Factors, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    r"""Split a damping into an addend to the eigenvalues of each factor.

    .. math:: \pi \sqrt{\gamma}, \quad \sqrt{\gamma} / \pi, \qquad
              \pi = \sqrt{\frac{\operatorname{tr}(A) / \dim A}{\operatorname{tr}(G) / \dim G}}

    which makes the smallest error under a trace norm. If a factor is zero, the ratio is 1. A factor may be the vector
    of its eigenvalues.

    Example:
        >>> from metagrad.curvature.kronecker.factors import Factors, split_damping
        >>> split_damping(Factors(4 * torch.eye(3), torch.eye(2)), 0.01)
        (tensor(0.2000), tensor(0.0500))

    References:
        Martens, Grosse, ICML 2015, section 6.3.
    """
    means = [(factor.diagonal() if factor.ndim == 2 else factor).mean() for factor in factors]
    is_zero = (means[0] <= 0) | (means[1] <= 0)
    ratio = torch.where(is_zero, 1, means[0] / torch.where(is_zero, 1, means[1])).sqrt()
    return ratio * damping**0.5, damping**0.5 / ratio


def scaling_of(inputs: Tensor, gradients: Tensor, basis: Factors, max_elements: int = 2**22) -> Tensor:
    r"""Sum the squares of the examples' gradients in a basis.

    .. math:: S = \sum_n \bigl(Q_G^\top \nabla W_n \, Q_A\bigr)^2, \qquad \nabla W_n = \sum_t g_{n t} a_{n t}^\top

    This is the diagonal of :math:`\sum_n \operatorname{vec}(\nabla W_n) \operatorname{vec}(\nabla W_n)^\top` in that
    basis. It is the diagonal matrix that is nearest in Frobenius norm.

    Args:
        inputs: Rows ``[examples, positions, inputs]``.
        gradients: Rows ``[examples, positions, outputs]``.
        basis: The eigenvectors of both factors, as columns.
        max_elements: Maximum number of elements of the examples' gradients in memory at a time.

    Returns:
        ``[outputs, inputs]``.

    References:
        George, Laurent, Bouthillier, Ballas, Vincent, "Fast approximate natural gradient descent in a
        Kronecker-factored eigenbasis", NeurIPS 2018, section 3.
    """
    a, g = inputs @ basis.inputs, gradients @ basis.outputs
    if a.shape[1] == 1:
        return g.squeeze(1).square().mT @ a.squeeze(1).square()
    size = max(1, max_elements // (a.shape[-1] * g.shape[-1]))
    chunks = zip(a.split(size), g.split(size), strict=True)
    return torch.stack([(some_g.mT @ some_a).square().sum(0) for some_a, some_g in chunks]).sum(0)


def rotated(left: Tensor | None, weights: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ weights @ right``. None means the identity."""
    return (weights if left is None else left @ weights) @ right


def eigenpairs(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the eigenvalues of a factor, at least 0, and its eigenvectors as columns. A vector is a diagonal."""
    if factor.ndim == 1:
        return factor, None
    values, vectors = linalg.eigh(factor.double() if len(factor) <= LARGEST_IN_DOUBLE else factor)
    return values.clamp(min=0).to(factor.dtype), vectors.to(factor.dtype)


Block = Mapping[str, Any]
"""The state of a layer: ``inputs`` and ``outputs``, running averages of factors over ``updates`` estimates.

Without ``eigen`` also ``input_inverse`` and ``output_inverse``, the inverses of the damped factors. With ``eigen``
their eigenvectors ``input_basis`` and ``output_basis``, and ``scaling``, the second moments of gradients in that
basis.
"""


def updated(
    block: Block, sums: Sums, weight: float, decay: float, *, damping: float | None = None
) -> dict[str, Any]:
    r"""Return a block with running averages of the factors, and the inverses of the damped averages.

    .. math:: A = \frac{1}{N} \sum_{n, t} a_{n t} a_{n t}^\top, \qquad
              G = \frac{w}{T} \sum_{n, t} g_{n t} g_{n t}^\top, \qquad
              A_k = \epsilon_k A_{k-1} + (1 - \epsilon_k) A, \qquad \epsilon_k = \min(1 - 1 / k, \beta)

    over N examples and T positions. A linear layer on vectors has one position.

    Args:
        block: The block, empty before the first estimate.
        sums: Sums over all examples of a step.
        weight: The factor :math:`w`. It is N for gradients of a mean over examples, which contain :math:`1 / N`, so
            that :math:`w \sum_n g_n g_n^\top` is an average. It is 1 for gradients of a sum.
        decay: Maximum decay rate :math:`\beta` of an average.
        damping: The damping of the inverses. None does not recompute the inverses.

    Raises:
        torch.linalg.LinAlgError: A factor is singular: the damping is zero, or below its rounding errors.

    Example:
        >>> from metagrad.curvature.kronecker.factors import NO_SUMS, updated
        >>> sums = NO_SUMS.plus([(torch.tensor([[[2.0]], [[4.0]]]), torch.tensor([[[0.5]], [[0.5]]]))])
        >>> block = updated({}, sums, sums.num_examples, 0.95)
        >>> float(block["inputs"]), float(block["outputs"])
        (10.0, 1.0)

    References:
        Martens, Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML 2015,
        sections 3 and 5; Grosse, Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers",
        ICML 2016, theorem 1.
    """
    count, num_positions = block.get("updates", 0) + 1, sums.num_rows / sums.num_examples
    factors = Factors(sums.inputs / sums.num_examples, sums.outputs * (weight / num_positions))
    if "inputs" in block:
        before, kept = Factors(block["inputs"], block["outputs"]), min(1 - 1 / count, decay)
        factors = Factors(*(torch.lerp(new, old, kept) for new, old in zip(factors, before, strict=True)))
    found = {**block, "updates": count, "inputs": factors.inputs, "outputs": factors.outputs}
    if damping is not None:
        shares = split_damping(factors, damping)
        for name, factor, share in zip(("input_inverse", "output_inverse"), factors, shares, strict=True):
            damped = factor.clone()
            damped.diagonal().add_(share.to(factor))
            found[name] = torch.cholesky_inverse(linalg.cholesky(damped))
    return found


def diagonalized(
    block: Block, squares: Callable[[Factors], Tensor], decay: float, *, is_due: bool
) -> dict[str, Any]:
    """Return a block with second moments of gradients in its eigenbasis, which is recomputed if ``is_due``.

    Args:
        block: The block.
        squares: Maps a basis to the second moments of gradients in that basis.
        decay: Decay rate of the second moments while the basis is unchanged.
        is_due: Whether to recompute the basis.
    """
    if is_due:
        basis = Factors(*(linalg.eigh(block[name])[1] for name in Factors._fields))
        scaling = squares(basis)
    else:
        basis = Factors(block["input_basis"], block["output_basis"])
        kept = min(1 - 1 / block["updates"], decay)
        scaling = torch.lerp(squares(basis), block["scaling"], kept)
    return {**block, "input_basis": basis.inputs, "output_basis": basis.outputs, "scaling": scaling}


class Eigenblock(NamedTuple):
    r"""The block :math:`(Q_L \otimes Q_R) \operatorname{diag}(S) (Q_L \otimes Q_R)^\top` of some parameters.

    The parameters are a matrix ``[outputs, inputs]``. A bias is its last column.

    Attributes:
        names: Names of the parameters.
        left: Eigenvectors :math:`Q_L` as columns. None means the identity.
        right: Eigenvectors :math:`Q_R`.
        eigenvalues: :math:`S`, in the shape of the matrix.
        spectra: Eigenvalues of the right and the left factor of a Kronecker product. None for other blocks.
    """

    names: tuple[str, ...]
    left: Tensor | None
    right: Tensor
    eigenvalues: Tensor
    spectra: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of_factors(cls, names: tuple[str, ...], left: Tensor, right: Tensor | None = None) -> Eigenblock:
        """Make the Kronecker product of two factors, or one matrix.

        If the left factor is a vector, it is the diagonal of a matrix.
        """
        (rows, vectors), one = eigenpairs(left), left.new_ones(1, 1)
        if right is None:
            return cls(names, vectors, one, rows.unsqueeze(1))
        columns, basis = eigenpairs(right)
        assert basis is not None
        return cls(names, vectors, basis, torch.outer(rows, columns), (columns, rows))

    def scaled(self, parts: Sequence[Tensor], factors: Tensor) -> list[Tensor]:
        """Multiply rows of the parameters, ``[k, *shape]`` each, by factors of the eigenvectors."""
        size = 1 if self.eigenvalues.shape[1] == 1 else len(self.eigenvalues)  # of matrices, else vectors
        matrices = torch.cat([part.reshape(len(part), size, -1) for part in parts], 2)
        whole = matrices.reshape(len(matrices), *self.eigenvalues.shape).to(self.eigenvalues.dtype)
        left = None if self.left is None else self.left.mT
        product = rotated(self.left, rotated(left, whole, self.right) * factors, self.right.mT)
        widths = [part[0].numel() // size for part in parts]
        split = product.to(matrices.dtype).reshape(matrices.shape).split(widths, 2)
        return [own.reshape(part.shape) for own, part in zip(split, parts, strict=True)]

    def damped(self, damping: float | Tensor, *, split: bool) -> Tensor:
        """Return the eigenvalues with damping, which ``split`` divides between the factors if there are factors."""
        if not split or self.spectra is None:
            return self.eigenvalues + damping
        to_right, to_left = split_damping(Factors(*self.spectra), damping)
        return torch.outer(self.spectra[1] + to_left, self.spectra[0] + to_right)
