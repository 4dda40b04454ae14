"""The Hessian of a loss as an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from metagrad.autograd.blocks.types import Chain
from metagrad.autograd.checks.missing_derivatives import MissingDerivative, refuse_missing
from metagrad.autograd.derivatives.batched_vjp import Chunk, checked_chunk
from metagrad.autograd.derivatives.linearize import linearized
from metagrad.autograd.derivatives.lookups import pads
from metagrad.autograd.derivatives.variables import (
    Variable,
    differentiated,
    end_nodes,
    find_variables,
    stacked,
)
from metagrad.core.graph import graph_nodes
from metagrad.core.tree import Tree, tree_map, tree_structure
from metagrad.curvature.operators.batches import Batch, Progress, Reduction, accumulated, is_one_batch
from metagrad.curvature.operators.modes import (
    Blockwise,
    Choice,
    FiniteDifference,
    Forward,
    Mode,
    Multiplier,
    Reverse,
)
from metagrad.curvature.operators.named import Named
from metagrad.curvature.operators.objective import LossFn, Objective, Parameters, takes_nothing
from metagrad.curvature.operators.operator import Operator
from metagrad.curvature.operators.space import ParameterSpace
from metagrad.sparse.matrix.tensor import SparseTensor

_CALL = "hessian(loss, params)"


def hessian(
    loss: Tensor | LossFn,
    params: Parameters,
    data: Batch | Iterable[Batch] | None = None,
    *,
    sparse: Sequence[str] = (),
    mode: Mode = "auto",
    chunk: Chunk = "64MiB",
    create_graph: bool = False,
    allow_unused: bool = False,
    reduction: Reduction = "mean",
    progress: Progress | None = None,
    check_deterministic: bool = True,
    step: float | None = None,
    allow_kinks: bool = False,
) -> Operator:
    r"""Make the operator of the Hessian of a loss.

    .. math:: H = \nabla^2 L(\theta), \qquad H v = \frac{d}{d\varepsilon} \nabla L(\theta + \varepsilon v)
              \Big|_{\varepsilon = 0}

    =================== =============================================== ============================================
    mode                how                                             cost, and where it does not work
    =================== =============================================== ============================================
    "reverse"           the gradient's graph is kept, and serves all    1.5 to 2.3 gradients for each product, and
                        products                                        the memory of the graph; wherever the tape
                                                                        has second derivatives
    "forward"           ``torch.func.jvp`` of ``torch.func.grad``       3 to 4 gradients, nothing kept; not with
                                                                        BatchNorm in training, checkpoints and what
                                                                        lacks forward derivatives
    "block"             forward over reverse, block by block            4 to 5 gradients, the memory of one block;
                                                                        ``loss`` must be a
                                                                        :func:`metagrad.autograd.chain`
    "finite_difference" central differences of gradients                2 gradients; about 10 digits in float64, 4 in
                                                                        float32; smooth losses
    "auto"              "reverse", or with a warning that says why the
                        next that works
    =================== =============================================== ============================================

    All but the first need the loss as a function. Each evaluation runs it again, with the same random numbers, and so
    the running statistics of BatchNorm in training are updated again. Finite differences see through ``detach()``:
    what is a constant for derivatives varies for them.

    Args:
        loss: A tensor with one element, and its graph; or a function ``loss_fn(params, *batch)`` that returns one, or
            one without required arguments that reads the parameters where they are.
        params: Parameters by name, such as ``dict(model.named_parameters())`` or some of them; a
            :class:`~metagrad.sparse.SparseTensor` has its stored values for coordinates. A function's need not
            require grad.
        data: What ``loss_fn`` takes beside the parameters: a batch, a tuple of arguments; or an iterable of batches
            that can be iterated over again, through which every product goes, with the graph of one at a time.
        sparse: Embedding tables to be taken by the rows that the loss looks up; those with sparse gradients are
            anyway. Their vectors are :class:`~metagrad.sparse.RowSparse`.
        mode: How.
        chunk: Working memory that several products at a time may take, in bytes or as ``"64MiB"``.
        create_graph: Put products on the tape, to be differentiated in the parameters and in vectors; but not those
            made under ``torch.no_grad()``.
        allow_unused: Take parameters that the loss does not depend on for constants, instead of raising.
        reduction: For several batches, how their losses are made of their terms: ``"mean"``, ``"sum"``, or a function
            of the batch that counts; see :func:`~metagrad.curvature.accumulated`.
        progress: For several batches; called as ``progress(done, total)``, or a progress bar.
        check_deterministic: For several batches: compute loss, gradient and a product twice, and raise if they
            differ.
        step: For finite differences, the length of the step relative to ``1 + |params along v|``; by default the cube
            root of the rounding unit.
        allow_kinks: Let finite differences step across kinks.

    Returns:
        An operator, which is a context manager; of one batch it has the ``loss`` and its ``gradient``, flat.

    Raises:
        ValueError: The loss is not one number, or not connected to a parameter (it is named); the mode is unknown, or
            needs the loss as a function; a derivative is missing or known to be wrong in torch; two passes over the
            data differ; and, in products, a step crosses a kink, or a product has nan or inf.
        TypeError: ``params`` is no dict of floating point tensors, or ``data`` is an iterator.

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
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994; Dagreou, Ablin,
        Vaiter, Moreau, "How to compute Hessian-vector products?", ICLR blog posts 2024.
    """
    ParameterSpace(params)  # checks them
    how = _How(tuple(sparse), checked_chunk(_CALL, chunk), create_graph, allow_unused, step, allow_kinks)
    choice = Choice(_CALL, _modes(loss, params, mode, create_graph))
    if isinstance(loss, Tensor):
        if data is not None:
            raise ValueError(
                f"{_CALL}: data goes with a loss function, but loss is a tensor. Leave data out."
            )
        return HessianOperator(_Source(loss, params, how), choice)

    if data is not None and takes_nothing(loss):
        raise ValueError(
            f"{_CALL}: loss takes no arguments, so data has nowhere to go. Take (params, *batch)."
        )

    def operator_for(batch: Batch, index: int = 0) -> HessianOperator:
        return HessianOperator(_Source(Objective(loss, params, _arguments(batch)), params, how), choice)

    if data is None or is_one_batch(data):
        return operator_for(() if data is None else data)
    return accumulated(
        operator_for,
        params,
        data,
        call="hessian(loss_fn, params, data)",
        reduction=reduction,
        progress=progress,
        check_deterministic=check_deterministic,
        model=loss.model if isinstance(loss, Chain) else None,
    )


@dataclass(frozen=True)
class _How:
    """The options of :func:`hessian` that concern one batch."""

    sparse: tuple[str, ...]
    chunk: int
    create_graph: bool
    allow_unused: bool
    step: float | None
    allow_kinks: bool


class _Source:
    """What the Hessian is of, on one batch: a loss with its graph, or a loss function."""

    def __init__(self, loss: Tensor | Objective, params: Parameters, how: _How) -> None:
        self.loss = loss
        self.params = loss.params if isinstance(loss, Objective) else dict(params)
        self.how = how

    def multiplier(self, mode: Mode) -> tuple[Multiplier, Tensor, Named]:
        """Return what multiplies, the loss, and its gradient."""
        how = self.how
        loss = self.loss if isinstance(self.loss, Tensor) else self.loss.here()
        variables = find_variables(_CALL, loss, self.params, how.sparse)
        space = _space_of(self.params, variables)
        if mode == "reverse":
            spec = tree_structure(self.params)
            lin = linearized(_CALL, loss, variables, spec, how.allow_unused, how.create_graph)
            return Reverse(lin, space, how.chunk), lin.loss, lin.gradient
        assert isinstance(self.loss, Objective)
        self._refuse_wrong(loss, variables, mode)
        self.loss.padding = {
            name: variable.lookups.padding
            for name, variable in zip(self.params, variables, strict=True)
            if variable.lookups is not None
        }
        gradient = _gradient(loss, variables, space, how)
        loss = loss if how.create_graph else loss.detach()
        if mode == "finite_difference":
            return FiniteDifference(self.loss, space, how.step, how.allow_kinks), loss, gradient
        kind = Forward if mode == "forward" else Blockwise
        return kind(self.loss, space, how.create_graph), loss, gradient

    def _refuse_wrong(self, loss: Tensor, variables: list[Variable], mode: Mode) -> None:
        """Refuse what torch cuts or gets wrong; what it lacks is met when it is needed."""
        order = 1 if mode == "finite_difference" else 3 if self.how.create_graph else 2
        ends = end_nodes(variables)
        refuse_missing(_CALL, loss, order=order, behind=ends, kinds=("cut", "wrong"))
        if mode == "finite_difference" and pads(graph_nodes([loss], set(ends))):
            raise MissingDerivative(
                f'{_CALL}, mode="finite_difference": the loss looks padding up, which is a constant for derivatives '
                "and none for differences. Name the table in sparse, or take another mode."
            )


class HessianOperator(Operator):
    """The Hessian of one loss; :func:`hessian` makes it.

    Attributes:
        loss: The loss at the parameters.
    """

    def __init__(self, source: _Source, choice: Choice) -> None:
        self._source: _Source | None = source
        self._choice = choice
        self._multiplier: Multiplier
        self._gradient: Named
        self.loss: Tensor
        self._begin()
        super().__init__(self._multiplier.space)

    def _begin(self) -> None:
        """Start in the first mode that does."""
        assert self._source is not None
        try:
            self._multiplier, self.loss, self._gradient = self._source.multiplier(self._choice.mode)
        except MissingDerivative as error:
            self._choice.reject(error)
            self._begin()

    @property
    def gradient(self) -> Tensor:
        """The gradient at the parameters, flat; ``H.space.unflatten(H.gradient)`` names its parts."""
        return self.space.flatten(self._gradient)

    def _products(self, vectors: Tensor) -> Tensor:
        return self._attempt(lambda multiplier: multiplier.products(vectors))

    def _block_products(self, block: ParameterSpace, vectors: Tensor) -> Tensor:
        self._refuse_closed()

        def multiply(multiplier: Multiplier) -> Tensor:
            if isinstance(multiplier, Reverse):
                return multiplier.block_products(block, vectors)
            return self.space.narrow(block, multiplier.products(self.space.widen(block, vectors)))

        return self._attempt(multiply)

    def _attempt(self, multiply: Callable[[Multiplier], Tensor]) -> Tensor:
        """Multiply in the first mode that can."""
        try:
            products = multiply(self._multiplier)
        except MissingDerivative as error:
            self._choice.reject(error)
            self._multiplier.close()
            self._begin()
            return self._attempt(multiply)
        self._choice.settle()
        return products

    def _free(self) -> None:
        self._multiplier.close()
        del self._multiplier
        self._source = None
        self.loss, self._gradient = self.loss.detach(), tree_map(torch.Tensor.detach, self._gradient)


def _modes(loss: Tensor | LossFn, params: Parameters, mode: Mode, create_graph: bool) -> list[Mode]:
    """List the modes to try."""
    if mode not in get_args(Mode):
        raise ValueError(f"{_CALL}: mode must be one of {', '.join(get_args(Mode))}, got {mode!r}.")
    if not isinstance(loss, Tensor) and not callable(loss):
        raise TypeError(f"{_CALL}: loss must be a tensor or a function, got {type(loss).__name__}.")
    is_function = not isinstance(loss, Tensor) and not takes_nothing(loss)
    is_chain = isinstance(loss, Chain) and not any(isinstance(p, SparseTensor) for p in params.values())
    possible: list[Mode] = ["reverse"]
    if is_function:
        possible += ["forward", *(["block"] if is_chain else []), "finite_difference"]  # type: ignore[reportAssignmentType]
    if create_graph and is_function:
        possible.remove("finite_difference")
    if mode == "auto":
        return possible
    if mode not in possible:
        raise ValueError(f"{_CALL}: mode={mode!r} {_needs(mode, is_function)}")
    return [mode]


def _needs(mode: Mode, is_function: bool) -> str:
    if not is_function:
        return (
            "evaluates the loss at other points: pass it as a function of (params, *data), not as a value or a "
            "closure."
        )
    if mode == "block":
        return (
            "needs to know the blocks: pass metagrad.autograd.chain(model, loss_fn) for the loss, with ordinary "
            "parameters."
        )
    return 'has no derivatives: leave create_graph at False, or take mode="reverse".'


def _arguments(batch: Batch) -> tuple[Tree, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _space_of(params: Parameters, variables: list[Variable]) -> ParameterSpace:
    tables = [variable.lookups for variable in variables]
    rows = {n: found.table.rows for n, found in zip(params, tables, strict=True) if found is not None}
    return ParameterSpace(params, rows=rows)


def _gradient(loss: Tensor, variables: list[Variable], space: ParameterSpace, how: _How) -> Named:
    parts = differentiated(
        _CALL, loss, variables, allow_unused=how.allow_unused, create_graph=how.create_graph
    )
    with torch.set_grad_enabled(how.create_graph):
        found = [v.scatter(stacked(came), 1).squeeze(0) for v, came in zip(variables, parts, strict=True)]
        return space.unflatten(space.join(found))
