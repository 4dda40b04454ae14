"""The one engine of curvature: outputs with their graph, and products with their Jacobian and its transpose."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from metagrad.autograd.checks.missing_derivatives import refuse_missing
from metagrad.autograd.derivatives.grad import check_loss, check_params
from metagrad.autograd.derivatives.graph_vjp import TransposedProduct, graph_vjp, transposed_product
from metagrad.core.modules import has_memory, refuse_freed, refuse_sharded
from metagrad.core.tree import Tree, leaf_names, tree_leaves
from metagrad.memory.storages import Ledger, StorageMode
from metagrad.sparse.tables.row_sparse import RowSparse


class JacobianGraph:
    r"""Outputs :math:`z(\theta)` with their graph, for any number of products with their Jacobian :math:`J`.

    .. math:: \mathrm{pull}(u) = J^\top u = \nabla_\theta \langle z, u \rangle, \qquad
              \mathrm{push}(v) = J v = \nabla_u \langle J^\top u, v \rangle

    The outputs of a Hessian are the parts of a gradient, so that ``pull`` is its product. A Gauss-Newton matrix is
    ``push``, a matrix of the outputs, and ``pull``.

    Args:
        call: How errors name the caller.
        outputs: Tensors with a graph; those without one, and None, have a derivative of zero.
        params: What to differentiate with respect to, by what errors call it.
        create_graph: Put products on the tape while grad mode is on.

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994; Townsend, "A new trick
        for calculating Jacobian vector products", 2017.
    """

    def __init__(
        self,
        call: str,
        outputs: Sequence[Tensor | None],
        params: Mapping[str, Tensor],
        *,
        create_graph: bool = False,
    ) -> None:
        self.call = call
        self.outputs = outputs
        self.params: dict[str, Tensor] = dict(params)
        self.inputs: list[Tensor] = list(params.values())
        self._create_graph = create_graph
        self._transposed: TransposedProduct | None = None
        self._seen = [(p, p._version, p.data_ptr()) for p in self.inputs if has_memory(p)]

    @property
    def on_tape(self) -> bool:
        """Whether a product that is made now can be differentiated."""
        return self._create_graph and torch.is_grad_enabled()

    def pull(self, cotangents: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
        """Multiply the transposed Jacobian with cotangents, or with stacks ``[m, *shape]`` of them."""
        found = graph_vjp(
            self.outputs,
            self.inputs,
            cotangents,
            batched=batched,
            create_graph=self.on_tape,
            retain_graph=True,
        )
        return _filled(found, self.inputs, len(cotangents[0]) if batched else None)

    def push(self, tangents: Sequence[Tensor], batched: bool = False) -> list[Tensor]:
        """Multiply the Jacobian with tangents, or with stacks of them."""
        cotangents, products = self._record()
        found = graph_vjp(
            products, cotangents, tangents, batched=batched, create_graph=self.on_tape, retain_graph=True
        )
        return _filled(found, cotangents, len(tangents[0]) if batched else None)

    def mixed(self, cotangents: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor | None]:
        """Multiply the transposed Jacobian in other tensors of the graph; None where nothing depends on one."""
        return graph_vjp(self.outputs, others, cotangents, create_graph=self.on_tape, retain_graph=True)

    def block(self, places: Sequence[int], *, is_symmetric: bool) -> JacobianGraph:
        """Return the columns of some parameters, by number; of a symmetric matrix, their diagonal block."""
        outputs = [self.outputs[i] for i in places] if is_symmetric else self.outputs
        names = list(self.params)
        params = {names[i]: self.inputs[i] for i in places}
        part = JacobianGraph(self.call, outputs, params, create_graph=self._create_graph)
        if not is_symmetric:
            cotangents, products = self._record()
            part._transposed = TransposedProduct(cotangents, [products[i] for i in places])
        return part

    def refuse_moved(self) -> None:
        """Raise ``ValueError`` if a parameter was written since the graph was recorded; the error names it."""
        for p, version, memory in self._seen:
            if p._version != version or p.data_ptr() != memory:
                refuse_freed(self.call, self.params)
                name = next(name for name, param in self.params.items() if param is p)
                raise ValueError(
                    f"{self.call}: {name} was written since the graph was recorded, and products would mix two "
                    "points. Make a new operator after each step of an optimizer, or take copies of the parameters, "
                    "p.detach().clone()."
                )

    def _record(self) -> TransposedProduct:
        """Record the backward pass for cotangents that are variables, once."""
        if self._transposed is None:
            outputs = [z for z in self.outputs if z is not None]
            refuse_order(self.call, outputs, self.inputs, 3 if self._create_graph else 2)
            self._transposed = transposed_product(outputs, self.inputs)
            _refuse_sparse(self.call, self.params, self._transposed.products)
        return self._transposed


def recorded_gradient(call: str, loss: Tensor, params: Tree, *, create_graph: bool = False) -> JacobianGraph:
    """Return the gradient of a loss with its graph, for products with the Hessian.

    Args:
        call: How errors name the caller.
        loss: A tensor with one element, and its graph.
        params: A tree of tensors that require grad and that the loss was computed from.
        create_graph: Put products on the tape.

    Raises:
        ValueError: The loss is no scalar with a graph or does not depend on a parameter, a parameter stands under two
            names or has a sparse gradient, or an operation lacks a derivative.
    """
    check_loss(call, loss)
    named = checked_leaves(call, params)
    leaves = list(named.values())
    refuse_order(call, [loss], leaves, 3 if create_graph else 2)
    parts = torch.autograd.grad(loss, leaves, torch.ones_like(loss), create_graph=True, allow_unused=True)
    refuse_freed(call, named)
    refuse_unused(call, {name: part is not None for name, part in zip(named, parts, strict=True)})
    _refuse_sparse(call, named, parts)
    return JacobianGraph(call, parts, named, create_graph=create_graph)


def checked_leaves(call: str, params: Tree) -> dict[str, Tensor]:
    """Return the leaves of a tree by what errors call them.

    Raises:
        ValueError: A leaf does not require grad or stands under two names, or there is none.
        TypeError: A leaf is no tensor.
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
    """Raise ``ValueError`` if a loss does not depend on all parameters; the error names the others."""
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
    """Raise ``MissingDerivative`` if torch lacks a derivative of this order, or has it wrong."""
    behind = [get_gradient_edge(p).node for p in inputs]
    for output in outputs:
        refuse_missing(call, output, order=order, behind=behind)


def _filled(found: Sequence[Tensor | None], like: Sequence[Tensor], count: int | None) -> list[Tensor]:
    """Put zeros where there is no derivative."""
    leading = () if count is None else (count,)
    return [z.new_zeros(*leading, *z.shape) if f is None else f for f, z in zip(found, like, strict=True)]


Product = Callable[[Tensor, bool], Tensor]
"""``product(row, False)`` multiplies ``[n]``; ``product(rows, True)`` multiplies ``[m, n]`` in one backward pass."""

# On a CPU, products together save the overhead of many small operations, and lose where their operands leave the
# cache. Time of 8 together on one core, relative to one by one, by the memory that one takes: 0.3 at 0.05 MiB, 0.6 to
# 0.8 at 0.25 to 0.5 MiB, 0.9 to 1.1 at 1 MiB, 1.1 to 1.4 at 2 MiB (transformers, MLPs and CNNs of several widths).
_CPU_CACHE = 4 * 2**20
_FEWEST_ON_CPU = 8


class BatchedVjp:
    """Runs products one by one or batched: as many as fit into a chunk, if batching is possible and faster.

    The first product is measured.

    Attributes:
        bytes_each: Working memory of one product at its peak, in bytes; None before the first.
        is_legal: False once an operation could not be batched.
    """

    def __init__(self) -> None:
        self.bytes_each: int | None = None
        self.is_legal: bool = True

    def rows(self, product: Product, vectors: Tensor, chunk: int) -> Tensor:
        """Multiply rows ``[k, n]``; no product is on the tape."""
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
        """Return how many products to ask for at once; two at first, one of which is measured."""
        if self.bytes_each is None:
            return 2
        on_cpu = device.type == "cpu"
        size = (min(chunk, _CPU_CACHE) if on_cpu else chunk) // max(1, self.bytes_each)
        return size if self.is_legal and size >= (_FEWEST_ON_CPU if on_cpu else 2) else 1

    def _one(self, product: Product, vector: Tensor) -> Tensor:
        if self.bytes_each is not None:
            return product(vector, False)
        with StorageMode(ledger := Ledger(vector.device)):
            found = product(vector, False)
        self.bytes_each = ledger.peak
        ledger.close()
        return found

    def _batched(self, product: Product, vectors: Tensor) -> Tensor | None:
        """Return None if an operation cannot be batched, or only by a loop of its own, which is slower."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*performance drop")
            try:
                return product(vectors, True)
            except (RuntimeError, NotImplementedError, UserWarning):
                # If the error has another cause, it is raised again by the products one by one.
                self.is_legal = False
                return None
