"""Gradients multiplied by matrices along the axes of each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core.checks import refuse
from metagrad.core.tree import Params
from metagrad.optim.kronecker.per_axis import axis_product
from metagrad.optim.per_parameter import checked_gradients
from metagrad.optim.rule import RuleNode


@dataclass(frozen=True, eq=False)
class AxisProducts(RuleNode):
    """The transform that :func:`axis_products` makes."""

    matrices: Mapping[str, Sequence[Tensor | None]]
    psd: bool = False
    batch_ndim: int = 0

    nested = ("matrices",)

    def init(self, params: Params) -> tuple[()]:
        """Return the state before the first step: there is none."""
        if params.keys() != self.matrices.keys():
            unknown, missing = (
                sorted(a.keys() - b.keys()) for a, b in ((self.matrices, params), (params, self.matrices))
            )
            raise ValueError(
                f"axis_products(matrices).init: matrices must have one entry for each parameter by name; unknown: "
                f"{unknown}, missing: {missing}. An empty tuple leaves a gradient as it is."
            )
        return ()

    def transform(self, grads: Params, state: tuple[()], params: Params) -> tuple[Params, tuple[()]]:
        """Multiply the gradient of every parameter."""
        grads = checked_gradients("axis_products(...)", grads, params)
        return {key: self._product(key, g, self.matrices[key]) for key, g in grads.items()}, state

    def _product(self, key: str, gradient: Tensor, matrices: Sequence[Tensor | None]) -> Tensor:
        tasks, axes = gradient.shape[: self.batch_ndim], gradient.shape[self.batch_ndim :]
        if not matrices:
            return gradient
        if len(matrices) > max(len(axes), 1):
            refuse(
                f"axis_products(matrices): {key!r}", f"at most {max(len(axes), 1)} matrices", len(matrices)
            )
        kept = len(matrices) - 1
        product = gradient.reshape(*tasks, *axes[:kept], math.prod(axes[kept:]))
        for axis, matrix in enumerate(matrices):
            if matrix is not None:
                product = self._along(f"{key!r}, axis {axis}", product, matrix, axis)
        return product.reshape(gradient.shape).to(gradient.dtype)

    def _along(self, place: str, value: Tensor, matrix: Tensor, axis: int) -> Tensor:
        """Multiply along one axis by a matrix, or by a diagonal given as a vector."""
        size = value.shape[self.batch_ndim + axis]
        if matrix.shape not in ((size, size), (size,)):
            raise ValueError(
                f"axis_products(matrices).transform: the matrix of {place}, must be [{size}, {size}], or [{size}] "
                f"for a diagonal, got {list(matrix.shape)}."
            )
        if matrix.ndim == 1:
            diagonal = matrix.square() if self.psd else matrix
            return value * diagonal.reshape(-1, *[1] * (value.ndim - self.batch_ndim - axis - 1))
        dtype = torch.promote_types(value.dtype, matrix.dtype)
        transposed = matrix.mT @ matrix if self.psd else matrix.mT
        return axis_product(value.to(dtype), transposed.to(dtype), axis, self.batch_ndim)


def axis_products(matrices: Mapping[str, Sequence[Tensor | None]], *, psd: bool = False) -> AxisProducts:
    r"""Make the transform that multiplies gradients by matrices along their axes, for :func:`chain`.

    .. math::
        G \leftarrow G \times_1 M_1 \times_2 M_2 \dots \times_k M_k, \qquad
        (G \times_1 M)_{i \dots} = \sum_j M_{ij} G_{j \dots}

    which is the Kronecker product :math:`M_1 \otimes \dots \otimes M_k` on the elements of :math:`G`. It is
    differentiable with respect to the matrices, which all stacked tasks share.

    Args:
        matrices: A dict from the name of a parameter to a matrix ``[n, n]`` for each of its axes. A vector ``[n]`` is
            a diagonal. None means the identity. If there are fewer matrices than axes, the last axes are flattened
            into one axis. So a convolution ``[out, in, height, width]`` with three matrices has one for outputs,
            inputs and the filter. Any matrix may require grad.
        psd: Multiply by :math:`M^\top M`, which is positive semi-definite, instead of :math:`M`.

    Raises:
        TypeError: ``matrices`` is not a mapping of sequences of tensors.
        ValueError: Parameters and entries differ, or a matrix does not fit its axis.

    Example:
        >>> rules = metagrad.optim.rules
        >>> swap, params = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), {"w": torch.zeros(2, 3)}
        >>> rule = rules.chain(rules.axis_products({"w": (swap, None)}), rules.sgd(lr=1.0))
        >>> gradients = {"w": torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])}
        >>> rule.update(gradients, rule.init(params), params)[0]["w"]
        tensor([[-3., -4., -5.],
                [ 0., -1., -2.]])

    References:
        Park, Oliva, "Meta-Curvature", NeurIPS 2019, section 3; Arnold, Iqbal, Sha, "When MAML can adapt fast and how
        to assist when it cannot", AISTATS 2021, for ``psd``.
    """
    if not isinstance(matrices, Mapping):
        refuse("axis_products(matrices)", "a dict by parameter name", type(matrices).__name__, TypeError)
    for key, own in matrices.items():
        if not isinstance(own, (tuple, list)) or not all(m is None or isinstance(m, Tensor) for m in own):
            raise TypeError(
                f"axis_products(matrices): matrices[{key!r}] must be a tuple of tensors or None, one for each axis, "
                f"got {own if isinstance(own, (tuple, list)) else type(own).__name__}."
            )
    return AxisProducts({key: tuple(own) for key, own in matrices.items()}, psd)
