"""The graph of a gradient, which serves any number of Hessian-vector products."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.autograd.derivatives.recorded import BatchedVjp, Recorded, recorded_gradient, split_rows
from metagrad.core import _torch
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.checks import refuse
from metagrad.core.tape import is_differentiated
from metagrad.core.tree import Tree, tree_flatten, tree_map, tree_unflatten

_CALL = "linearize(loss, params)"


def linearize(loss: Tensor, params: Tree, *, create_graph: bool = False) -> Linearization:
    r"""Compute the gradient of a loss once, and keep its graph for Hessian-vector products.

    .. math:: g = \nabla L(\theta), \qquad H v = \nabla_\theta \langle g(\theta), v \rangle

    A product takes as long as 1.5 to 2.3 gradients. Computing a product from the loss takes as long as 3 to 4
    gradients. ``close()`` frees the graph. Leaving the ``with`` block also closes it.

    Args:
        loss: A tensor with one element and a graph.
        params: A pytree of tensors that require grad and that the loss was computed from.
        create_graph: Return a gradient and products that are differentiable. Inside ``torch.func.grad``, they are
            differentiable in any case.

    Returns:
        A context manager with ``gradient`` and ``hvp(v)``.

    Raises:
        ValueError: ``loss`` has more than one element or no graph. A parameter does not require grad, is not used, or
            has a sparse gradient, and the message names it.
        MissingDerivative: The derivative of an operation is missing or incorrect in torch, at order 2, or at order 3
            with ``create_graph``.
        TypeError: A leaf of ``params`` is not a tensor.

    Example:
        :math:`L = \sum_k \theta_k^3` has the Hessian :math:`\mathrm{diag}(6 \theta)`:

        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with metagrad.autograd.linearize((w**3).sum(), {"w": w}) as lin:
        ...     lin.gradient, lin.hvp({"w": torch.tensor([1.0, 10.0])}), lin.hvp({"w": torch.eye(2)})
        ({'w': tensor([ 3., 12.])}, {'w': tensor([  6., 120.])}, {'w': tensor([[ 6.,  0.],
                [ 0., 12.]])})

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994.
    """
    create_graph = create_graph or is_differentiated()
    recorded = recorded_gradient(_CALL, loss, params, create_graph=create_graph)
    return Linearization(loss, params, recorded, create_graph=create_graph)


class Linearization:
    """The gradient of a loss, and its graph for Hessian-vector products. :func:`linearize` returns it.

    Loss and gradient have a graph until ``close()`` if :func:`linearize` was called with ``create_graph``.

    Attributes:
        loss: The value of the loss.
        gradient: The gradient, as a pytree like the parameters.
    """

    def __init__(self, loss: Tensor, params: Tree, recorded: Recorded, *, create_graph: bool) -> None:
        self._recorded: Recorded | None = recorded
        self._spec = tree_flatten(params)[1]
        self._batched = BatchedVjp()
        gradient = tree_unflatten(self._split(recorded, recorded.outputs), self._spec)
        self.loss: Tensor = loss if create_graph else loss.detach()
        self.gradient: Tree = gradient if create_graph else tree_map(torch.Tensor.detach, gradient)

    def __repr__(self) -> str:
        graph = "closed" if self._recorded is None else "open"
        return f"Linearization(loss={self.loss.item():.4g}, {self._spec.num_leaves} tensors, {graph})"

    def hvp(self, v: Tree, *, chunk: Bytes = "64MiB") -> Tree:
        """Compute a Hessian-vector product, or a stack of products.

        Args:
            v: A pytree like the parameters. For a stack of k vectors, every tensor has a leading dimension of size k.
            chunk: Maximum working memory for the products of a stack, in bytes or as ``"64MiB"``.

        Returns:
            The product, or the stack of products.

        Raises:
            ValueError: The graph is closed, or ``v`` has another structure, shape or dtype. A product has NaN or Inf,
                and the message names the parameter. A parameter was modified in place.

        Example:
            >>> w = torch.tensor(2.0, requires_grad=True)
            >>> with metagrad.autograd.linearize(w**4, w, create_graph=True) as lin:
            ...     curvature = lin.hvp(torch.tensor(1.0))
            >>> curvature.item(), metagrad.grad(curvature, w).item()  # 12 w^2, 24 w
            (48.0, 48.0)
        """
        recorded = self._recorded
        if recorded is None:
            raise ValueError("hvp(v): closed, and the graph is freed. Multiply inside the with block.")
        vectors, leading = self._read(recorded, v)
        size = checked_bytes("hvp(v)", "chunk", chunk)
        flat = torch.cat([part.reshape(*leading, -1) for part in vectors], -1)
        if leading:
            product = self._batched.rows(recorded.pull, flat, size, on_tape=recorded.on_tape)
        else:
            product = recorded.pull(flat)
        products = self._split(recorded, product)
        if not (_torch.functorch_is_active() or bool(product.isfinite().all())):
            self._refuse_nonfinite(recorded, vectors, products)
        return tree_unflatten(products, self._spec)

    def close(self) -> None:
        """Free the graph. Products raise afterwards. The gradient remains available, without its graph."""
        self._recorded = None
        self.gradient = tree_map(torch.Tensor.detach, self.gradient)
        self.loss = self.loss.detach()

    def __enter__(self) -> Linearization:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _split(self, recorded: Recorded, rows: Tensor) -> list[Tensor]:
        parts = split_rows(rows, recorded.inputs)
        pairs = zip(parts, recorded.inputs, strict=True)
        return [part if part.dtype == p.dtype else part.to(p.dtype) for part, p in pairs]

    def _read(self, recorded: Recorded, v: Tree) -> tuple[list[Tensor], tuple[int, ...]]:
        """Return the leaves of a vector, and the shape ``(k,)`` of a stack."""
        vectors, structure = tree_flatten(v)
        if structure != self._spec:
            refuse("hvp(v): v", f"the structure of the parameters, {self._spec}", structure)
        leading = tuple(vectors[0].shape[:1]) if vectors[0].ndim > recorded.inputs[0].ndim else ()
        for (name, p), vector in zip(recorded.params.items(), vectors, strict=True):
            expected, got = ((*leading, *p.shape), p.dtype), (tuple(vector.shape), vector.dtype)
            if got != expected or leading == (0,):
                raise ValueError(
                    f"hvp(v): the entry of {name} must be as its parameter is, {expected}, or a stack of as many as "
                    f"the others, got {got}."
                )
        return vectors, leading

    def _refuse_nonfinite(
        self, recorded: Recorded, vectors: Sequence[Tensor], products: Sequence[Tensor]
    ) -> None:
        for what, tensors in (("v", vectors), ("the product", products)):
            for name, tensor in zip(recorded.params, tensors, strict=True):
                if not is_finite([tensor]):
                    raise ValueError(f"hvp(v): {what} has nan or inf in the entry of {name}.")
