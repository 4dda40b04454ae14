"""The Hessian of a loss as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from metagrad.autograd.derivatives.recorded import recorded_gradient
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.checks import dtypes_explained, is_list_or_tuple
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import differentiable_run
from metagrad.curvature.likelihoods import recognized
from metagrad.curvature.operators.batches import (
    Batch,
    BatchedOperator,
    Reduction,
    checked_deterministic,
    count_of,
    is_one_batch,
)
from metagrad.curvature.operators.operator import GraphOperator, Operator
from metagrad.curvature.operators.space import Parameters, ParameterSpace, values_of, with_values

LossOfParams: TypeAlias = Callable[..., Tensor]
"""``loss_fn(params, *batch)``."""

_CALL = "hessian(loss, params)"


def hessian(
    loss: Tensor | LossOfParams,
    params: Parameters,
    data: Batch | Iterable[Batch] | None = None,
    *,
    chunk: Bytes = "64MiB",
    create_graph: bool = False,
    reduction: Reduction | None = None,
) -> Operator:
    r"""Make the operator of the Hessian of a loss.

    .. math:: H = \nabla^2 L(\theta), \qquad H v = \nabla_\theta \langle \nabla L(\theta), v \rangle

    The graph of the gradient is stored for all products. A Hessian-vector product (HVP) costs 1.5 to 2.3 gradients.
    Evaluating a loss function leaves the buffers of its modules unchanged.

    Args:
        loss: A tensor with one element and a graph, or a function ``loss_fn(params, *batch)`` that returns one.
        params: Parameters by name, such as ``dict(model.named_parameters())`` or some of them. The coordinates of a
            :class:`~metagrad.sparse.SparseTensor` are its stored values. If ``loss`` is a function, parameters need
            not require grad.
        data: The arguments of ``loss_fn`` after the parameters: one batch, which is a tuple of arguments. Or an
            iterable of batches that can be iterated over repeatedly. Then every product goes through all batches,
            with the graph of one batch at a time.
        chunk: Working memory of products that are computed together, in bytes or as ``"64MiB"``.
        create_graph: Make products differentiable with respect to the parameters and vectors.
        reduction: How the loss of a batch reduces its terms, if there are several batches. ``"mean"`` is over the
            first dimension of the first tensor of a batch. ``"sum"`` is a sum. A function of the batch returns the
            number of terms in its mean, such as tokens that are not padding. None uses the loss's own reduction if
            :func:`ggn` knows it in closed form, and ``"mean"`` for every other loss.

    Returns:
        An operator, which is a context manager. For one batch, the operator also has the ``loss`` and its flat
        ``gradient``.

    Raises:
        ValueError: The loss is not a scalar, or does not depend on a parameter (the error names it). A parameter has
            a sparse gradient. A derivative is missing, or torch is known to compute it incorrectly. Two passes over
            the data differ. A product has NaN or Inf, or the products are not symmetric.
        TypeError: ``params`` is not a dict of floating point tensors, or ``data`` is an iterator.

    Note:
        A hook or a custom ``autograd.Function`` that scales gradients also scales the products.

    Example:
        :math:`L = \tfrac12 x^\top A x`:

        >>> A, x = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.ones(2, requires_grad=True)
        >>> with metagrad.curvature.hessian(x @ A @ x / 2, {"x": x}) as H:
        ...     H @ torch.tensor([1.0, 0.0]), H.to_dense()
        (tensor([2., 1.]), tensor([[2., 1.],
                [1., 3.]]))

        As a function of parameters and batches:

        >>> def loss_fn(params, a, b): return (a @ params["x"] - b).square().mean()
        >>> batches = [(A, torch.zeros(2)), (A[:1], torch.zeros(1))]
        >>> with metagrad.curvature.hessian(loss_fn, {"x": x}, batches) as H:
        ...     H @ torch.tensor([3.0, 0.0])
        tensor([18., 14.])

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994.
    """
    space = ParameterSpace(params, call=_CALL)
    size = checked_bytes(_CALL, "chunk", chunk)
    values = {name: values_of(p) for name, p in params.items()}

    def of_loss(loss: Tensor, leaves: dict[str, Tensor]) -> HessianOperator:
        recorded = recorded_gradient(_CALL, loss, leaves, create_graph=create_graph)
        return HessianOperator(space, loss, recorded, chunk=size)

    if isinstance(loss, Tensor):
        if data is not None:
            raise ValueError(
                f"{_CALL}: data goes with a loss function, but loss is a tensor. Leave data out."
            )
        return of_loss(loss, values)
    if not callable(loss):
        raise TypeError(f"{_CALL}: loss must be a tensor or a function, got {type(loss).__name__}.")

    modules = ReachableObjects(loss).modules

    def of_batch(batch: Batch) -> HessianOperator:
        leaves = {name: p if p.requires_grad else p.detach().requires_grad_() for name, p in values.items()}
        arguments = tuple(batch) if is_list_or_tuple(batch) else (batch,)
        explained = dtypes_explained(_CALL, leaves.values(), arguments)
        with torch.enable_grad(), differentiable_run(_CALL, modules), explained:
            of_leaves = partial(loss, with_values(params, leaves), *arguments)
            try:
                value, known = (of_leaves(), None) if is_alone else recognized(of_leaves)
            except TypeError as error:
                if not isinstance(loss, torch.nn.Module):
                    raise
                raise TypeError(
                    f"{_CALL}: loss is a module, which was called as loss(params). Pass the loss of its output, or a "
                    "function of params that calls it by torch.func.functional_call."
                ) from error
        operator = of_loss(value, leaves)
        if not is_alone:
            says = "mean" if reduction is None and known is None else reduction
            operator.count = count_of(_CALL, batch, known, says)
        return operator

    batches = () if data is None else data
    is_alone = is_one_batch(batches)
    if is_alone:
        return of_batch(batches)
    return checked_deterministic(BatchedOperator(_CALL, space, of_batch, batches))


class HessianOperator(GraphOperator):
    """The Hessian of one loss, from the graph of its gradient. Made by :func:`hessian`."""

    is_symmetric = True

    @property
    def gradient(self) -> Tensor:
        """The flat gradient at the parameters. ``H.space.unflatten(H.gradient)`` returns its parts by name."""
        if self.is_closed:
            return self._gradient
        return self._recorded.outputs if self._recorded.create_graph else self._recorded.outputs.detach()

    def mixed(self, vector: Tensor, others: Sequence[Tensor]) -> list[Tensor | None]:
        r"""Differentiate :math:`\langle \nabla L, v \rangle` with respect to other tensors that the loss depends on.

        Args:
            vector: A flat vector ``[n]``, v.
            others: Tensors in the graph of the loss.

        Returns:
            The derivative for each tensor, differentiable with ``create_graph``. None for a tensor without a
            derivative.

        Example:
            >>> w, o = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
            >>> with metagrad.curvature.hessian(o * (w**2).sum(), {"w": w}) as H:
            ...     H.mixed(torch.ones(2), [o])
            [tensor(6.)]
        """
        self._refuse_closed()
        return self._recorded.mixed(vector, others)

    def _product(self, v: Tensor) -> Tensor:
        return self._recorded.pull(v)

    def _free(self) -> None:
        self._gradient = self.gradient.detach()
        super()._free()
