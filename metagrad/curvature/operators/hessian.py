"""The Hessian of a loss as an operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from metagrad.autograd.checks.missing_derivatives import MissingDerivative, refuse_missing
from metagrad.autograd.compile.compiled import Compile, checked_compile, reason
from metagrad.autograd.compile.linear import compiled_hvp
from metagrad.autograd.derivatives.hvp import hvp
from metagrad.autograd.derivatives.linearize import Linearization, linearized
from metagrad.autograd.derivatives.quick import QuickDerivatives
from metagrad.autograd.derivatives.variables import coordinates, differentiated, end_nodes, find_variables
from metagrad.core.budget import Bytes, checked_bytes
from metagrad.core.checks import is_list_or_tuple
from metagrad.core.tape import is_transformed
from metagrad.core.tree import Tree, tree_map, tree_structure
from metagrad.curvature.likelihoods.output_losses import OutputLoss
from metagrad.curvature.likelihoods.recognition import recognized
from metagrad.curvature.operators.batches import (
    Batch,
    Progress,
    Reduction,
    accumulated,
    batches_of,
    count_of,
    is_one_batch,
    refuse_graph,
)
from metagrad.curvature.operators.objective import BatchLoss, LossFn, takes_nothing
from metagrad.curvature.operators.operator import LossOperator, Named, Operator
from metagrad.curvature.operators.space import Parameters, ParameterSpace, check_params

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Mode = Literal["reverse", "forward"]

_CALL = "hessian(loss, params)"


def hessian(
    loss: Tensor | LossFn,
    params: Parameters,
    data: Batch | Iterable[Batch] | None = None,
    *,
    sparse: Sequence[str] = (),
    mode: Mode = "reverse",
    chunk: Bytes = "64MiB",
    create_graph: bool = False,
    compile: Compile = False,
    allow_unused: bool = False,
    reduction: Reduction | None = None,
    progress: Progress | None = None,
    check_deterministic: bool = True,
    group: ProcessGroup | None = None,
) -> Operator:
    r"""Make the operator of the Hessian of a loss.

    .. math:: H = \nabla^2 L(\theta), \qquad H v = \frac{d}{d\varepsilon} \nabla L(\theta + \varepsilon v)
              \Big|_{\varepsilon = 0}

    =================== =============================================== ============================================
    mode                how                                             cost, and where it does not work
    =================== =============================================== ============================================
    "reverse"           the gradient's graph is kept for all            1.5 to 2.3 gradients for each product, and
                        products                                        the memory of the graph; wherever the tape
                                                                        has second derivatives
    "forward"           ``torch.func.jvp`` of ``torch.func.grad``       3 to 4 gradients, nothing kept; not with
                                                                        BatchNorm in training, checkpoints and what
                                                                        lacks forward derivatives
    =================== =============================================== ============================================

    All but the first need the loss as a function. The first, given a function, calls it inside
    :class:`~metagrad.autograd.QuickDerivatives`. Each evaluation runs it again, with the same random numbers, and so
    the running statistics of BatchNorm in training are updated again.

    With ``compile`` the product is traced once, forward over reverse (or reverse over reverse, where an operation has
    no forward derivative and the mode is not ``"forward"``). All that does not depend on the vector is computed and
    kept; the rest is one compiled graph. A new operator is traced again, which takes seconds and pays for many
    products. A loss that writes running statistics, branches on numbers or calls an ``autograd.Function``, as sparse
    parameters and tables do, is refused.

    Args:
        loss: A tensor with one element, and its graph; or a function ``loss_fn(params, *batch)`` that returns one, or
            a function without required arguments that reads the parameters where they are.
        params: Parameters by name, such as ``dict(model.named_parameters())`` or some of them; the coordinates of a
            :class:`~metagrad.sparse.SparseTensor` are its stored values. If ``loss`` is a function, they need not
            require grad.
        data: The arguments of ``loss_fn`` besides the parameters: a batch, a tuple of arguments; or an iterable of
            batches that can be iterated over repeatedly: every product goes through all, with the graph of one at a
            time.
        sparse: Embedding tables of which only the rows that the loss looks up count; those with sparse gradients are
            treated so anyway. Their vectors are :class:`~metagrad.sparse.RowSparse`.
        mode: How products are computed: a row of the table.
        chunk: Working memory that several products at a time may take, in bytes or as ``"64MiB"``.
        create_graph: Put products on the tape, to be differentiated in the parameters and in vectors; but not those
            made under ``torch.no_grad()``.
        compile: Compile the product; a dict holds options of ``torch.compile``. For one batch, for ``loss`` as a
            function, and without ``create_graph``.
        allow_unused: Treat parameters that the loss does not depend on as constants, instead of raising.
        reduction: For several batches, how their losses reduce their terms: ``"mean"``, ``"sum"``, or a function
            of the batch that counts; see :func:`~metagrad.curvature.accumulated`. None takes what a loss says that
            :func:`ggn` knows in closed form, with what it ignores and weighs, and of every other loss the mean.
        progress: For several batches; called as ``progress(done, total)``, or a progress bar.
        check_deterministic: For several batches: compute loss, gradient and a product twice, and raise if they
            differ.
        group: Processes that have other data each, as a share of the batches: products are those of all data. They
            make the same products in the same order, with the same parameters and vectors, and without a graph.

    Returns:
        An operator, which is a context manager; of one batch it has the ``loss`` and its ``gradient``, flat.

    Raises:
        ValueError: The loss is not one number, or does not depend on a parameter (it is named); the mode is unknown,
            or needs the loss as a function; a derivative is missing or known to be wrong in torch; two passes over
            the data differ; the product cannot be compiled; or a product has nan or inf.
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
    check_params(_CALL, params)
    _check(loss, params, mode)
    options = _checked_compile(compile, loss, mode, create_graph, data)
    size = checked_bytes(_CALL, "chunk", chunk)
    how = _How(mode, tuple(sparse), size, create_graph, options, allow_unused)
    refuse_graph(_CALL, group, has_data=data is not None, create_graph=create_graph)
    if isinstance(loss, Tensor):
        if data is not None:
            raise ValueError(
                f"{_CALL}: data goes with a loss function, but loss is a tensor. Leave data out."
            )
        return _with_graph(loss, params, how)
    if data is not None and takes_nothing(loss):
        raise ValueError(
            f"{_CALL}: loss takes no arguments, so data has nowhere to go. Take (params, *batch)."
        )

    def evaluated(batch: Batch) -> tuple[HessianOperator, OutputLoss | None]:
        objective = BatchLoss(loss, params, _arguments(batch))
        if mode == "reverse" and options is None:
            with QuickDerivatives():
                value, known = recognized(objective.here)
            return _with_graph(value, objective.params, how), known
        value, known = recognized(objective.here)
        return _evaluated(value, objective, how), known

    def operator_for(batch: Batch) -> HessianOperator:
        operator, known = evaluated(batch)
        says = "mean" if reduction is None and known is None else reduction
        operator.count = count_of(call, batch, known, says)
        return operator

    if group is None and (data is None or is_one_batch(data)):
        return evaluated(() if data is None else data)[0]
    call = "hessian(loss_fn, params, data)"
    return accumulated(
        operator_for,
        params,
        batches_of(data),
        call=call,
        reduction=None,
        progress=progress,
        check_deterministic=check_deterministic,
        group=group,
    )


class _How(NamedTuple):
    """The options of :func:`hessian` that concern one batch."""

    mode: Mode
    sparse: tuple[str, ...]
    chunk: int
    create_graph: bool
    compile: dict[str, Any] | None
    allow_unused: bool


class HessianOperator(LossOperator):
    """The Hessian of one loss; :func:`hessian` makes it.

    Attributes:
        loss: The loss at the parameters.
    """

    def __init__(self, space: ParameterSpace, loss: Tensor, gradient: Named) -> None:
        super().__init__(space)
        self.loss = loss
        self._gradient = gradient

    @property
    def gradient(self) -> Tensor:
        """The gradient at the parameters, flat; ``H.space.unflatten(H.gradient)`` names its parts."""
        return self.space.flatten(self._gradient)

    def __repr__(self) -> str:
        return f"HessianOperator(shape={self.shape}, dtype={self.dtype})"

    def mixed(self, vector: Tensor, others: Sequence[Tensor]) -> list[Tensor | None]:
        r"""Differentiate :math:`\langle \nabla L, v \rangle` with respect to what else the loss was computed from.

        Args:
            vector: A flat vector ``[n]``, v.
            others: Tensors in the graph of the loss.

        Returns:
            For each its derivative, on the tape with ``create_graph``; None where there is none.

        Raises:
            ValueError: The mode is not ``"reverse"``, and there is no graph.

        Example:
            >>> w, o = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
            >>> with metagrad.curvature.hessian(o * (w**2).sum(), {"w": w}) as H:
            ...     H.mixed(torch.ones(2), [o])
            [tensor(6.)]
        """
        raise ValueError(f'{_CALL}.mixed(vector, others): pass mode="reverse", which keeps the graph.')

    def _free(self) -> None:
        self.loss, self._gradient = self.loss.detach(), tree_map(torch.Tensor.detach, self._gradient)


class _Linearized(HessianOperator):
    """Products from the graph of the gradient, which is kept."""

    def __init__(self, space: ParameterSpace, lin: Linearization, chunk: int) -> None:
        super().__init__(space, lin.loss, lin.gradient)
        self._lin = lin
        self._chunk = chunk

    @property
    def num_together(self) -> int:
        """How many products are computed together."""
        self._refuse_closed()
        return self._lin.num_together(self._chunk)

    def _products(self, vectors: Tensor) -> Tensor:
        return self._block_products(self.space, vectors)

    def mixed(self, vector: Tensor, others: Sequence[Tensor]) -> list[Tensor | None]:
        self._refuse_closed()
        on_tape = self._lin.create_graph and torch.is_grad_enabled()
        return self._lin.mixed(self.space.split(vector), others, create_graph=on_tape)

    def _block_products(self, block: ParameterSpace, vectors: Tensor) -> Tensor:
        """Multiply rows of a diagonal block: the backward passes go no further than that."""
        self._refuse_closed()
        only = [self.space.names.index(name) for name in block.names]
        on_tape = self._lin.create_graph and torch.is_grad_enabled()
        pieces = self._lin.pieces(block.split(vectors), chunk=self._chunk, create_graph=on_tape, only=only)
        if on_tape:
            return torch.cat([block.join(parts) for _, parts in pieces])
        products = torch.empty_like(vectors)
        for place, parts in pieces:
            for part, columns in zip(parts, block.slices.values(), strict=True):
                products[place, columns] = part.reshape(len(part), -1)
        return products

    def _free(self) -> None:
        self._lin.close()
        del self._lin
        super()._free()


class _Evaluated(HessianOperator):
    """Products for which the loss is evaluated again: forward over reverse."""

    def __init__(
        self, space: ParameterSpace, loss: Tensor, gradient: Named, objective: BatchLoss, how: _How
    ) -> None:
        super().__init__(space, loss, gradient)
        self._objective = objective
        self._how = how
        self._point = objective.made_at(_CALL)

    def _products(self, vectors: Tensor) -> Tensor:
        on_tape = self._how.create_graph and torch.is_grad_enabled()
        with self._point.read_again():
            return torch.stack([self._forward(row, on_tape) for row in vectors])

    def _forward(self, vector: Tensor, on_tape: bool) -> Tensor:
        objective, space = self._objective, self.space

        def loss_at(coordinates: list[Tensor]) -> Tensor:
            return objective.at(space, coordinates)

        try:
            with torch.set_grad_enabled(on_tape):
                point, direction = objective.point(space), space.split(vector)
                found = hvp(loss_at, point, direction, mode="forward", create_graph=on_tape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The loss has run once without the transform, so the transform is the cause.
            what = str(error).splitlines()[0]
            raise MissingDerivative(f"{_CALL}: torch.func does not run this loss: {what}") from error
        return space.join(found.product)

    def _free(self) -> None:
        del self._objective, self._point
        super()._free()


class _Compiled(HessianOperator):
    """Products by a compiled graph of what depends on the vector."""

    def __init__(
        self, space: ParameterSpace, loss: Tensor, gradient: Named, objective: BatchLoss, how: _How
    ) -> None:
        super().__init__(space, loss, gradient)
        self._point = objective.made_at(_CALL)
        point = [at.detach() for at in objective.point(space)]

        def loss_at(at: list[Tensor]) -> Tensor:
            return objective.at(space, at).reshape(())

        try:
            with objective.random_numbers():
                self._product = compiled_hvp(
                    loss_at, point, forward_only=how.mode == "forward", options=how.compile or {}
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # The loss has run once without being traced, so the trace or the compiler is the cause.
            raise MissingDerivative(
                f"{_CALL}: the product cannot be compiled: {reason(error)}. Leave compile out."
            ) from error

    def _products(self, vectors: Tensor) -> Tensor:
        if is_transformed():
            raise ValueError(f"{_CALL}: products that are compiled run outside of torch.func transforms.")
        products = torch.empty_like(vectors, requires_grad=False)
        with self._point.read_again():
            for row, product in zip(vectors.detach(), products, strict=True):
                parts = self._product(self.space.split(row))
                for part, place in zip(parts, self.space.split(product), strict=True):
                    place.copy_(part)
        return products

    def _free(self) -> None:
        del self._product, self._point
        super()._free()


def _with_graph(loss: Tensor, params: Parameters, how: _How) -> HessianOperator:
    variables = find_variables(_CALL, loss, params, how.sparse)
    spec = tree_structure(dict(params))
    lin = linearized(_CALL, loss, variables, spec, how.allow_unused, how.create_graph)
    return _Linearized(ParameterSpace.of(params, variables), lin, how.chunk)


def _evaluated(loss: Tensor, objective: BatchLoss, how: _How) -> HessianOperator:
    variables = find_variables(_CALL, loss, objective.params, how.sparse)
    # What torch cuts or gets wrong; a missing derivative raises when it is needed.
    order = 3 if how.create_graph else 2
    refuse_missing(_CALL, loss, order=order, behind=end_nodes(variables), kinds=("cut", "wrong"))
    objective.find_padding(variables)
    parts = differentiated(
        _CALL, loss, variables, allow_unused=how.allow_unused, create_graph=how.create_graph
    )
    space = ParameterSpace.of(objective.params, variables)
    with torch.set_grad_enabled(how.create_graph):
        gradient = space.unflatten(space.join(coordinates(variables, parts)))
    kind = _Evaluated if how.compile is None else _Compiled
    return kind(space, loss if how.create_graph else loss.detach(), gradient, objective, how)


def _check(loss: Tensor | LossFn, params: Parameters, mode: Mode) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"{_CALL}: mode must be one of {', '.join(get_args(Mode))}, got {mode!r}.")
    if not isinstance(loss, Tensor) and not callable(loss):
        raise TypeError(f"{_CALL}: loss must be a tensor or a function, got {type(loss).__name__}.")
    if mode != "reverse" and (isinstance(loss, Tensor) or takes_nothing(loss)):
        raise ValueError(
            f"{_CALL}: mode={mode!r} evaluates the loss at other points: pass it as a function of (params, *data), "
            "not as a value or a closure."
        )


def _checked_compile(
    compile: Compile, loss: Tensor | LossFn, mode: Mode, create_graph: bool, data: object
) -> dict[str, Any] | None:
    """Return the options of torch.compile, None where nothing is compiled."""
    checked = checked_compile(_CALL, compile)
    if checked is None:
        return None
    refused = {
        "takes the loss as a function of (params, *data)": isinstance(loss, Tensor) or takes_nothing(loss),
        "compiles one product, and has no whole to compile": checked.whole,
        "goes without create_graph: compiled products have no graph": create_graph,
        "is for one batch": data is not None and not is_one_batch(data),
    }
    for rule, is_broken in refused.items():
        if is_broken:
            raise ValueError(f"{_CALL}: compile {rule}.")
    return checked.options


def _arguments(batch: Batch) -> tuple[Tree, ...]:
    return tuple(batch) if is_list_or_tuple(batch) else (batch,)
