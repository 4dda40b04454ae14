"""The gradient of a loss, linearized: one graph that serves any number of Hessian-vector products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from metagrad.autograd.checks.missing_derivatives import named_if_missing, refuse_missing
from metagrad.autograd.derivatives.batched_vjp import Together
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.autograd.derivatives.point import Point
from metagrad.autograd.derivatives.variables import (
    Variable,
    coordinates,
    differentiated,
    end_nodes,
    find_variables,
    pull_back,
)
from metagrad.core import _torch
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.tape import is_differentiated
from metagrad.core.tree import Tree, TreeSpec, tree_flatten, tree_map, tree_structure, tree_unflatten

_CALL = "linearize(loss, params)"


def linearize(
    loss: Tensor,
    params: Tree,
    *,
    sparse: Sequence[str] = (),
    allow_unused: bool = False,
    create_graph: bool = False,
) -> Linearization:
    r"""Compute the gradient of a loss once, and keep its graph for Hessian-vector products.

    .. math:: g = \nabla L(\theta), \qquad H v = \nabla_\theta \langle g(\theta), v \rangle

    A product costs 1.5 to 2.3 gradients, where one that starts from the loss costs 3 to 4. The graph is freed by
    ``close()``, or on leaving the ``with`` block, also by an exception; what the loss itself holds is the caller's.

    Embedding tables whose gradient is sparse (``nn.Embedding(sparse=True)``, ``metagrad.sparse.embedding``), and
    those named by ``sparse``, are differentiated with respect to the rows that the loss looks up: their gradient,
    vectors and products are :class:`~metagrad.sparse.RowSparse`, and nothing is as large as the table.

    Args:
        loss: A tensor with one element, and its graph.
        params: A tree of tensors that require grad and that the loss was computed from.
        sparse: Tables to be taken by rows; for a dict of parameters, its keys.
        allow_unused: Return zeros for parameters that the loss does not depend on, instead of an error.
        create_graph: Put the gradient on the tape, and, where they are not asked otherwise, the products; inside
            ``torch.func.grad`` they always are.

    Returns:
        A context manager with ``gradient`` and ``hvp(v)``.

    Raises:
        ValueError: ``loss`` has more than one element or no graph; a parameter does not require grad, or is not
            used (it is named); a sparse table is used otherwise than by lookups. As its subclass
            ``MissingDerivative``: an operation's derivative of order 2, or with ``create_graph`` of order 3, is
            missing or wrong in torch, as that of ``layer_norm`` at order 3 is.
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
    variables = find_variables(_CALL, loss, params, sparse)
    create_graph = create_graph or is_differentiated()
    return linearized(_CALL, loss, variables, tree_structure(params), allow_unused, create_graph)


def linearized(
    call: str, loss: Tensor, variables: list[Variable], spec: TreeSpec, allow_unused: bool, create_graph: bool
) -> Linearization:
    """Linearize with respect to variables that were found; ``call`` is how errors name the caller."""
    refuse_missing(call, loss, order=3 if create_graph else 2, behind=end_nodes(variables))
    parts = differentiated(call, loss, variables, allow_unused=allow_unused, create_graph=True)
    return Linearization(loss, variables, spec, parts, create_graph=create_graph)


class Linearization:
    """The gradient of a loss, and its graph for Hessian-vector products; :func:`linearize` makes it.

    Attributes:
        loss: Its value.
        gradient: In the tree of the parameters. Both are on the tape until closed, if linearized with
            ``create_graph``.
        variables: The parameters, with their coordinates; none when closed.
    """

    def __init__(
        self,
        loss: Tensor,
        variables: list[Variable],
        spec: TreeSpec,
        parts: list[list[Tensor | None]],
        *,
        create_graph: bool,
    ) -> None:
        self.loss: Tensor = loss if create_graph else loss.detach()
        self.variables: list[Variable] = variables
        self.create_graph = create_graph
        self.is_closed: bool = False
        self._spec = spec
        self._parts = parts
        self._source = loss
        self._has_third = create_graph
        self._together = Together()
        self._point = Point("hvp(v)", {variable.name: variable.leaf for variable in variables})
        with torch.set_grad_enabled(create_graph):
            gradient = self._tree(coordinates(variables, parts))
        self.gradient: Tree = gradient if create_graph else tree_map(torch.Tensor.detach, gradient)

    def hvp(self, v: Tree, *, chunk: Bytes = "64MiB", create_graph: bool | None = None) -> Tree:
        """Multiply the Hessian with a vector, or with several.

        Args:
            v: In the tree and the forms of the gradient; or a stack of k, where every tensor has a leading dimension
                of size k.
            chunk: How much working memory the products of a stack may take beside their results. At least one is
                computed at a time, and more where that fits and is faster.
            create_graph: Put the products on the tape, so that they can be differentiated with respect to the
                parameters, ``v`` and whatever else the loss was computed from; by default as
                :func:`linearize` was.

        Returns:
            The product, or the stack of products, likewise.

        Raises:
            ValueError: Closed; ``v`` has another structure or shape; a product has nan or inf (the parameter is
                named); an operation lacks the derivative; or a parameter was given other memory since.
            TypeError: An entry of ``v`` has another form than the gradient's.

        Example:
            >>> w = torch.tensor(2.0, requires_grad=True)
            >>> with metagrad.autograd.linearize(w**4, w) as lin:
            ...     curvature = lin.hvp(torch.tensor(1.0), create_graph=True)
            >>> curvature.item(), metagrad.grad(curvature, w).item()  # 12 w^2, 24 w
            (48.0, 48.0)
        """
        self._refuse_closed()
        vectors, is_stack = self._read(v)
        size = checked_bytes("hvp(v)", "chunk", chunk)
        on_tape = self.create_graph if create_graph is None else create_graph or is_differentiated()
        pieces = self.pieces(vectors, chunk=size, create_graph=on_tape)
        with torch.set_grad_enabled(on_tape):
            products = _collected(pieces, vectors, on_tape)
            self._refuse_nonfinite(vectors, products)
            return self._tree(products if is_stack else [product.squeeze(0) for product in products])

    def pieces(
        self,
        vectors: Sequence[Tensor],
        *,
        chunk: int,
        create_graph: bool,
        only: Sequence[int] | None = None,
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        """Multiply stacks of coordinates piece by piece; yield which of a stack, and their products.

        Args:
            vectors: For each variable ``[k, *shape]``.
            chunk: In bytes.
            create_graph: Put the products on the tape.
            only: The variables that ``vectors`` and products are of, by number: a diagonal block. None: all.
        """
        self._refuse_closed()
        self._point.refuse_moved()
        if create_graph and not self._has_third:
            refuse_missing(
                "hvp(v, create_graph=True)", self._source, order=3, behind=end_nodes(self.variables)
            )
            self._has_third = True
        chosen = range(len(self.variables)) if only is None else only

        product = partial(self._product, chosen=chosen, create_graph=create_graph)
        # Derivatives of what vmap has batched are not always right (torch 2.13: torch.func.jacrev of a gradient with
        # layer_norm or batch_norm), so what goes on the tape is computed one by one.
        yield from self._together.pieces(product, vectors, chunk, one_by_one=create_graph)

    def num_together(self, chunk: int) -> int:
        """Return how many products are computed together; more vectors than that at a time only take memory."""
        return self._together.most(chunk, self.loss.device)

    def mixed(
        self, v: Sequence[Tensor], others: Sequence[Tensor], *, create_graph: bool | None = None
    ) -> list[Tensor | None]:
        r"""Differentiate :math:`\langle g, v \rangle` with respect to what else the loss was computed from.

        Args:
            v: The coordinates ``[*shape]`` of each variable.
            others: Tensors in the graph of the loss.
            create_graph: As of :meth:`hvp`.

        Returns:
            :math:`\frac{\partial^2 L}{\partial o \, \partial \theta} v` for each of them; None where there is none.

        Example:
            >>> w, o = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
            >>> with metagrad.autograd.linearize(o * (w**2).sum(), w) as lin:
            ...     lin.mixed([torch.ones(2)], [o])
            [tensor(6.)]
        """
        self._refuse_closed()
        self._point.refuse_moved()
        on_tape = self.create_graph if create_graph is None else create_graph
        with torch.set_grad_enabled(on_tape), named_if_missing("mixed(v, others)"):
            outputs, cotangents = self._at_gradient(range(len(self.variables)), [part[None] for part in v])
            cotangents = [c.squeeze(0) for c in cotangents]
            return graph_vjp(outputs, others, cotangents, create_graph=on_tape, retain_graph=True)

    def gradient_on_tape(self) -> list[Tensor]:
        """Return the coordinates ``[*shape]`` of the gradient with its graph, whatever ``create_graph`` is."""
        self._refuse_closed()
        with torch.enable_grad():
            return coordinates(self.variables, self._parts)

    def close(self) -> None:
        """Free the graph; products raise from now on. The gradient stays, without graph."""
        self.is_closed = True
        self.gradient = tree_map(torch.Tensor.detach, self.gradient)
        self.loss = self._source = self.loss.detach()
        self._parts, self.variables = [], []
        self._point = Point("hvp(v)", {})

    def __enter__(self) -> Linearization:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _product(
        self, vectors: list[Tensor], together: bool, *, chosen: Sequence[int], create_graph: bool
    ) -> list[Tensor]:
        """Multiply vectors with the Hessian, by the vector-Jacobian product of the gradient."""
        variables = [self.variables[i] for i in chosen]
        with torch.set_grad_enabled(create_graph), named_if_missing("hvp(v)"):
            outputs, cotangents = self._at_gradient(chosen, vectors)
            return pull_back(
                outputs,
                variables,
                cotangents,
                count=len(vectors[0]),
                together=together,
                create_graph=create_graph,
            )

    def _at_gradient(
        self, chosen: Sequence[int], vectors: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """Return the parts of the gradient, and what vectors are at each of them, ``[k, ...]``."""
        parts = [part for i in chosen for part in self._parts[i]]
        gathered = zip(chosen, vectors, strict=True)
        return parts, [at for i, vector in gathered for at in self.variables[i].gather(vector)]

    def _read(self, v: Tree) -> tuple[list[Tensor], bool]:
        entries, structure = tree_flatten(v)
        if structure != self._spec:
            raise ValueError(
                f"hvp(v): v must have the structure of the parameters, {self._spec}, got {structure}."
            )
        names = [variable.name.replace("params", "v", 1) for variable in self.variables]
        vectors = [x.read(e, f"hvp(v): {n}") for x, e, n in zip(self.variables, entries, names, strict=True)]
        counts = {
            len(v) if v.ndim > len(x.shape) else None for x, v in zip(self.variables, vectors, strict=True)
        }
        if len(counts) > 1 or counts == {0}:
            raise ValueError(
                f"hvp(v): the entries of v must be all vectors, or all stacks of as many, got {counts}."
            )
        is_stack = counts != {None}
        return vectors if is_stack else [vector.unsqueeze(0) for vector in vectors], is_stack

    def _tree(self, values: Sequence[Tensor]) -> Tree:
        wrapped = [x.wrap(c) for x, c in zip(self.variables, values, strict=True)]
        return tree_unflatten(wrapped, self._spec)

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise ValueError("hvp(v): closed, and the graph is freed. Multiply inside the with block.")

    def _refuse_nonfinite(self, vectors: list[Tensor], products: list[Tensor]) -> None:
        # Inside a transform numbers cannot be looked at.
        if _torch.functorch_is_active() or all_finite(products):
            return
        for what, tensors in (("v", vectors), ("the product", products)):
            for variable, tensor in zip(self.variables, tensors, strict=True):
                if not all_finite([tensor]):
                    raise ValueError(f"hvp(v): {what} has nan or inf in the entry of {variable.name}.")


def _collected(
    pieces: Iterator[tuple[slice, list[Tensor]]], vectors: list[Tensor], on_tape: bool
) -> list[Tensor]:
    """Join the pieces of a stack; off the tape, without a second copy of them."""
    if on_tape or len(vectors[0]) == 1:
        parts = [products for _, products in pieces]
        return [torch.cat(of_one) for of_one in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
    stacks = [torch.empty_like(vector, requires_grad=False) for vector in vectors]
    for place, products in pieces:
        for stack, product in zip(stacks, products, strict=True):
            stack[place] = product
    return stacks


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Say whether all numbers are finite, with one synchronization of the device."""
    # A sum is finite only if its terms are; if it is not, it may have overflowed.
    if bool(torch.stack([tensor.detach().sum() for tensor in tensors]).isfinite().all()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
