"""The engine of curvature: outputs with their graph, and products with their Jacobian and its transpose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from metagrad.autograd.checks.missing_derivatives import refuse_missing
from metagrad.autograd.derivatives.grad import check_loss, check_params
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.core.modules import has_memory, refuse_freed, refuse_sharded
from metagrad.core.tree import Tree, leaf_names, tree_leaves, zeros_for_none
from metagrad.memory.storages import StorageCounter, StorageMode
from metagrad.sparse.tables.row_sparse import RowSparse


class Recorded:
    r"""Outputs :math:`z(\theta)` with their graph, for any number of products with their Jacobian :math:`J`.

    .. math:: \mathrm{pull}(u) = J^\top u = \nabla_\theta \langle z, u \rangle, \qquad
              \mathrm{push}(v) = J v = \nabla_u \langle J^\top u, v \rangle

    If the outputs are a gradient, ``pull`` is the Hessian-vector product. A Gauss-Newton product is ``push``, a
    product with a matrix of the outputs, and ``pull``. All vectors are flat: outputs and parameters are concatenated.
    Autograd is faster with one flat cotangent than with one cotangent for each parameter.

    Args:
        call: Name of the caller in error messages.
        outputs: Tensors. An output without a graph has a derivative of zero.
        params: The tensors to differentiate with respect to, by their names in errors.
        create_graph: Return differentiable products in grad mode.

    Attributes:
        outputs: The flat outputs, ``[m]``.
        parts: The outputs in the structure in which they were given.
        inputs: The parameters.
        create_graph: The argument ``create_graph``.

    Example:
        >>> from metagrad.autograd.derivatives.recorded import Recorded
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> recorded = Recorded("square", [w**2, w.sum()], {"w": w})
        >>> recorded.push(torch.tensor([1.0, 10.0])), recorded.pull(torch.eye(3))
        (tensor([ 2., 40., 11.]), tensor([[2., 0.],
                [0., 4.],
                [1., 1.]]))

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994; Townsend, "A new trick
        for calculating Jacobian vector products", 2017.
    """

    def __init__(
        self,
        call: str,
        outputs: Sequence[Tensor],
        params: Mapping[str, Tensor],
        *,
        create_graph: bool = False,
    ) -> None:
        self.call = call
        self.params: dict[str, Tensor] = dict(params)
        self.inputs: list[Tensor] = list(params.values())
        self.parts: list[Tensor] = list(outputs)
        with torch.enable_grad():
            flat = [z.reshape(-1) for z in outputs]
            self.outputs: Tensor = flat[0] if len(flat) == 1 else torch.cat(flat)
        self.create_graph = create_graph
        self._sizes = [p.numel() for p in self.inputs]
        self._transposed: Recorded | None = None
        self._seen = [(name, p, p._version, p.data_ptr()) for name, p in self.params.items() if has_memory(p)]

    @property
    def on_tape(self) -> bool:
        """True if products are differentiable at the moment."""
        return self.create_graph and torch.is_grad_enabled()

    def pull(self, cotangents: Tensor) -> Tensor:
        """Multiply the transposed Jacobian by a cotangent ``[m]``, or by ``[k, m]`` in one backward pass."""
        self.refuse_moved()
        leading = cotangents.shape[:-1]
        if not self.outputs.requires_grad:
            return cotangents.new_zeros(*leading, sum(self._sizes))
        found = torch.autograd.grad(
            self.outputs,
            self.inputs,
            cotangents,
            is_grads_batched=bool(leading),
            create_graph=self.on_tape,
            retain_graph=True,
            allow_unused=True,
        )
        parts = [
            cotangents.new_zeros(*leading, size) if part is None else part.reshape(*leading, size)
            for part, size in zip(found, self._sizes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def push(self, tangents: Tensor) -> Tensor:
        """Multiply the Jacobian by a tangent ``[n]`` or by ``[k, n]``, with the graph of ``pull``."""
        if self._transposed is None:
            self._transposed = self._transpose()
        return self._transposed.pull(tangents)

    def mixed(self, cotangent: Tensor, others: Sequence[Tensor]) -> list[Tensor | None]:
        """Multiply the transposed Jacobian with respect to ``others`` by a cotangent. None for unused tensors."""
        self.refuse_moved()
        return graph_vjp([self.outputs], others, [cotangent], create_graph=self.on_tape, retain_graph=True)

    def block(self, places: Sequence[int], *, is_symmetric: bool) -> Recorded:
        """Return the columns of the Jacobian for some parameters.

        For a symmetric Jacobian, return the diagonal block.
        """
        self.refuse_moved()
        named = list(self.params.items())
        outputs = [self.parts[i] for i in places] if is_symmetric else self.parts
        params = dict(named[i] for i in places)
        return Recorded(self.call, outputs, params, create_graph=self.create_graph)

    def refuse_moved(self) -> None:
        """Raise ``ValueError`` if a parameter was modified after the graph was recorded."""
        for name, p, version, memory in self._seen:
            if p._version != version or p.data_ptr() != memory:
                refuse_freed(self.call, {name: p})
                raise ValueError(
                    f"{self.call}: {name} was written since the graph was recorded, and products would mix two "
                    "points. Make a new operator after each step of an optimizer, or take copies of the parameters, "
                    "p.detach().clone()."
                )

    def _transpose(self) -> Recorded:
        """Record the backward pass, which is linear in the cotangent, for a variable cotangent."""
        refuse_order(self.call, [self.outputs], self.inputs, 3 if self.create_graph else 2)
        with torch.enable_grad():
            u = torch.zeros_like(self.outputs, requires_grad=True)
            products = graph_vjp([self.outputs], self.inputs, [u], create_graph=True)
        _refuse_sparse(self.call, self.params, products)
        filled = zeros_for_none(products, self.inputs)
        transposed = Recorded(self.call, filled, {"u": u}, create_graph=self.create_graph)
        transposed._seen = self._seen
        return transposed


def recorded_gradient(call: str, loss: Tensor, params: Tree, *, create_graph: bool = False) -> Recorded:
    """Return the gradient of a loss with its graph, for products with the Hessian.

    Args:
        call: Name of the caller in error messages.
        loss: A tensor with one element, and its graph.
        params: A pytree of tensors that require grad and that the loss was computed from.
        create_graph: Return differentiable products.

    Raises:
        ValueError: The loss is not a scalar with a graph, or it does not depend on a parameter. A parameter has two
            names or a sparse gradient. An operation lacks a derivative.
    """
    check_loss(call, loss)
    named = checked_leaves(call, params)
    leaves = list(named.values())
    refuse_order(call, [loss], leaves, 3 if create_graph else 2)
    try:
        parts = torch.autograd.grad(loss, leaves, torch.ones_like(loss), create_graph=True, allow_unused=True)
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        raise RuntimeError(
            f"{call}: torch cannot differentiate the loss: {error} If backward() or grad() has freed the graph of "
            "the loss, compute the loss again, or call loss.backward(retain_graph=True) before."
        ) from error
    refuse_freed(call, named)
    refuse_unused(call, {name: part is not None for name, part in zip(named, parts, strict=True)})
    _refuse_sparse(call, named, parts)
    return Recorded(call, parts, named, create_graph=create_graph)


def checked_leaves(call: str, params: Tree) -> dict[str, Tensor]:
    """Return the leaves of a pytree by their names in errors.

    Raises:
        ValueError: A leaf does not require grad or has two names, or there is no leaf.
        TypeError: A leaf is not a tensor.
    """
    leaves, names = tree_leaves(params), leaf_names(params, "params")
    check_params(call, params, leaves)
    if not leaves:
        raise ValueError(f"{call}: there are no parameters.")
    named = dict(zip(names, leaves, strict=True))
    refuse_sharded(call, named)
    first: dict[int, str] = {}
    for name, p in named.items():
        other = first.setdefault(id(p), name)
        if other != name:
            raise ValueError(
                f"{call}: {other} and {name} are one tensor, whose coordinates would count twice. Leave one out, as "
                "model.named_parameters() does."
            )
    return named


def refuse_unused(call: str, is_used: Mapping[str, bool]) -> None:
    """Raise ``ValueError`` if a loss does not depend on all parameters. The error names the unused parameters."""
    unused = [name for name, used in is_used.items() if not used]
    if unused:
        raise ValueError(
            f"{call}: the loss does not depend on {', '.join(unused)}. Leave it out of params, or add 0 * p.sum()."
        )


def _refuse_sparse(call: str, names: Iterable[str], parts: Sequence[Tensor | None]) -> None:
    for name, part in zip(names, parts, strict=True):
        if isinstance(part, RowSparse) or (part is not None and part.layout != torch.strided):
            raise ValueError(
                f"{call}: the gradient of {name} is row-sparse, and curvature needs dense ones. Leave the table out "
                "of params, or look rows up without sparse gradients (sparse=False)."
            )


def refuse_order(call: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], order: int) -> None:
    """Raise ``MissingDerivative`` if a derivative of this order is missing or incorrect in torch."""
    behind = [get_gradient_edge(p).node for p in inputs]
    for output in outputs:
        refuse_missing(call, output, order=order, behind=behind)


def rows_of(tensors: Sequence[Tensor], count: int) -> Tensor:
    """Return tensors of ``count`` items each as rows ``[count, n]``."""
    return torch.cat([tensor.reshape(count, -1) for tensor in tensors], 1)


def tensors_of(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Invert :func:`rows_of`."""
    parts = rows.split_with_sizes([t.numel() // max(len(rows), 1) for t in like], 1)
    return [part.reshape(t.shape) for part, t in zip(parts, like, strict=True)]


def split_rows(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split ``[..., n]`` into one ``[..., *shape]`` for each tensor. The tensors have n elements in total."""
    parts = rows.split_with_sizes([tensor.numel() for tensor in like], -1)
    return [part.reshape((*rows.shape[:-1], *t.shape)) for part, t in zip(parts, like, strict=True)]


Product = Callable[[Tensor], Tensor]
"""Takes one row ``[n]``, or rows ``[k, n]`` in one backward pass."""

# On a CPU, a batch of products saves the overhead of many small operations. It is slower if the operands do not fit
# the cache. A batch of 8 on one core takes 0.3 times as long as 8 products in turn if a product needs 0.05 MiB. The
# factor is about 1.0 at 1 MiB and 1.1 to 1.4 at 2 MiB.
_CPU_CACHE = 4 * 2**20
_FEWEST_ON_CPU = 8


class BatchedVjp:
    """Runs products in batches that fit into a chunk, or sequentially if batches are impossible or slower.

    The memory that the first product needs determines the size of the batches.

    Attributes:
        bytes_each: Peak working memory of one product, in bytes. None before the first product.
        is_legal: False once an operation could not be batched.
    """

    def __init__(self) -> None:
        self.bytes_each: int | None = None
        self.is_legal: bool = True

    def rows(self, product: Product, vectors: Tensor, chunk: int, *, on_tape: bool = False) -> Tensor:
        """Compute the products of rows ``[k, n]``. Differentiable products run sequentially."""
        if len(vectors) == 1:
            return product(vectors[0]).unsqueeze(0)
        if on_tape:
            # Derivatives of batched products are not always correct (torch 2.13: layer_norm, batch_norm).
            return torch.stack([product(row) for row in vectors])
        found = torch.empty_like(vectors, requires_grad=False)
        start = 0
        while start < len(vectors):
            size = min(self.most(chunk, vectors.device), len(vectors) - start)
            if self.bytes_each is None or size == 1:
                found[start] = self._one(product, vectors[start])
                start += 1
                continue
            products = self._batched(product, vectors[start : start + size])
            if products is not None:
                found[start : start + size] = products
                start += size
        return found

    def most(self, chunk: int, device: torch.device) -> int:
        """Return the number of products in the next batch.

        The first batch has two products, and the memory of the first product is measured.
        """
        if self.bytes_each is None:
            return 2
        on_cpu = device.type == "cpu"
        size = (min(chunk, _CPU_CACHE) if on_cpu else chunk) // max(1, self.bytes_each)
        return size if self.is_legal and size >= (_FEWEST_ON_CPU if on_cpu else 2) else 1

    def _one(self, product: Product, vector: Tensor) -> Tensor:
        if self.bytes_each is not None:
            return product(vector)
        with StorageMode(counter := StorageCounter(vector.device)):
            found = product(vector)
        self.bytes_each = counter.peak
        counter.close()
        return found

    def _batched(self, product: Product, vectors: Tensor) -> Tensor | None:
        """Return None if an operation cannot be batched, or if vmap would run it in a slower loop."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop")
            try:
                return product(vectors)
            except (RuntimeError, NotImplementedError, UserWarning):
                # If the error has another cause, a single product raises it again.
                self.is_legal = False
                return None
