"""Operators of data that come in batches: one batch's graph at a time, and the exact sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core._torch import distinct, linalg, named_modules, to_list
from metagrad.core.capture import AutocastState
from metagrad.core.checks import is_list_or_tuple
from metagrad.core.tree import Tree, tensors_in, tree_map
from metagrad.curvature.likelihoods.output_losses import OutputLoss
from metagrad.curvature.operators.operator import LossOperator, Operator
from metagrad.curvature.operators.space import Parameters, ParameterSpace
from metagrad.distributed.sums import refuse_different, sums, unions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Batch: TypeAlias = Tree
"""The arguments of a loss besides the parameters: a tuple such as ``(x, y)``, or a list of tensors."""

Reduction: TypeAlias = "Literal['mean', 'sum'] | Callable[[Batch], float]"
"""How the loss of a batch reduces its terms; see :func:`accumulated`."""


@runtime_checkable
class Bar(Protocol):
    """A progress bar, such as ``tqdm()``."""

    def update(self, n: int) -> object:
        """Advance by ``n`` batches."""
        ...


Progress: TypeAlias = "Callable[[int, int | None], object] | Bar"
"""``progress(done, total)``: batches of this pass over the data, total None if it is not known; or a progress bar."""


def is_one_batch(data: object) -> bool:
    """Tell one batch from an iterable of batches.

    A tensor, a tuple (named or not) and a list of tensors are one batch; everything else that can be iterated over,
    such as a list of tuples or a ``DataLoader``, is batches.
    """
    if is_list_or_tuple(data):
        return isinstance(data, tuple) or (bool(data) and isinstance(data[0], Tensor))
    return isinstance(data, (Tensor, Mapping)) or not isinstance(data, Iterable)


def batches_of(data: Iterable[Batch] | Batch) -> Iterable[Batch]:
    """Return batches: one batch alone as a list."""
    return [data] if is_one_batch(data) else data


def refuse_graph(call: str, group: ProcessGroup | None, *, has_data: bool, create_graph: bool) -> None:
    """Refuse what has no meaning in a group of processes."""
    if group is None:
        return
    if not has_data:
        raise ValueError(
            f"{call}: group sums over the data of processes. Give the loss as a function, and this process's data."
        )
    if create_graph:
        raise ValueError(
            f"{call}: create_graph=True: sums over processes have no graph. Leave group or create_graph out."
        )


def accumulated(
    operator_for: Callable[[Batch], LossOperator],
    params: Parameters,
    batches: Iterable[Batch],
    *,
    call: str = "accumulated(operator_for, params, batches)",
    reduction: Reduction | None = "mean",
    progress: Progress | None = None,
    check_deterministic: bool = True,
    begin_pass: Callable[[], None] | None = None,
    model: nn.Module | None = None,
    group: ProcessGroup | None = None,
) -> Accumulated:
    r"""Accumulate an operator over batches, exactly, with the graph of one batch at a time.

    .. math:: A = \sum_b \frac{n_b}{\sum_{b'} n_{b'}} A_b, \qquad\text{or}\qquad A = \sum_b A_b

    The first where the losses are means of :math:`n_b` terms each, the second where they are sums. Every product goes
    through all batches once, however many vectors are multiplied together: multiply many at a time. It is taken where
    the parameters are by then.

    Args:
        operator_for: Makes the operator of a batch, which is closed before the next is made.
        params: The parameters of all of them.
        batches: Can be iterated over again and again, with the same batches; their tensors are moved to the device
            of the parameters.
        call: How errors name the caller.
        reduction: ``"mean"``: a loss is the mean over the first dimension of the first tensor in the batch;
            ``"sum"``: it is a sum; a function of the batch: it is the mean of as many terms as it returns (of tokens
            that are not padding, say); None: the operators have the number in an attribute ``count``, None of a sum.
        progress: Called as ``progress(done, total)`` after each batch of each pass, total None where ``batches``
            has no length; or a progress bar, whose ``update(1)`` is called.
        check_deterministic: Compute the loss, its gradient and one product twice, and raise if they differ; this
            takes two passes.
        begin_pass: Called before each pass, to draw the same random numbers in all of them.
        model: Where to look for layers that may be the reason then.
        group: Processes that have other batches of the same data; sums go over the batches of all of them, of which
            some may have none. They make the same products in the same order, with the same parameters and vectors;
            products have no graph.

    Returns:
        The operator. Of sparse tables its coordinates are the rows that any batch looks up.

    Raises:
        ValueError: There are no batches, two passes differ (what moved is named, and why it may have), or
            ``reduction`` is unknown.
        TypeError: ``batches`` is an iterator, which is consumed by one pass.

    Example:
        :math:`\tfrac{1}{3} \sum_k x_k w^2` of two unequal batches; the Hessian is twice the mean of x:

        >>> w, H = torch.ones(1, requires_grad=True), metagrad.curvature.hessian
        >>> def loss_fn(params, x): return (x * params["w"] ** 2).mean()
        >>> A = H(loss_fn, {"w": w}, [(torch.tensor([1.0, 2.0]),), (torch.tensor([6.0]),)])
        >>> A @ torch.ones(1)
        tensor([6.])
    """
    if isinstance(batches, Iterator):
        raise TypeError(
            f"{call}: the data is a {type(batches).__name__}, which is consumed by one pass, but every product takes "
            "one. Give a list of batches, a DataLoader, or another object whose __iter__ starts anew."
        )
    if not callable(reduction) and reduction not in ("mean", "sum", None):
        raise ValueError(
            f'{call}: reduction must be "mean", "sum", or a function that returns how many terms the mean of a batch '
            f"has, got {reduction!r}."
        )
    found = Accumulated(operator_for, params, batches, call, reduction, progress, begin_pass, group)
    if check_deterministic:
        refuse_moving(call, found.probe(), found.probe(), model, batches)
    return found


class Accumulated(Operator):
    """An operator that is a mean or a sum over batches; made by :func:`accumulated`."""

    def __init__(
        self,
        operator_for: Callable[[Batch], LossOperator],
        params: Parameters,
        batches: Iterable[Batch],
        call: str,
        reduction: Reduction | None,
        progress: Progress | None,
        begin_pass: Callable[[], None] | None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(ParameterSpace(params))
        self.call = call
        self.batches = batches
        self.reduction = reduction
        self.progress = progress
        self._operator_for = operator_for
        self._begin_pass = begin_pass
        self._group = group
        # Products may be computed under another autocast state than the one that the model is meant to run in.
        self._autocast = AutocastState()
        self.space: ParameterSpace = self._joint_space(params)

    def _products(self, vectors: Tensor) -> Tensor:
        if self._group is not None:
            refuse_different(self.call, "the vector of a product", vectors, self._group)

        def multiply(operator: LossOperator, places: Tensor | None) -> list[Tensor]:
            return [self._multiplied(operator, places, vectors)]

        return self._sum(multiply, [vectors.shape])[0]

    def _block_products(self, block: ParameterSpace, vectors: Tensor) -> Tensor:
        self._refuse_closed()

        def multiply(operator: LossOperator, places: Tensor | None) -> list[Tensor]:
            if places is None:
                return [operator._block_products(block, vectors)]
            wide = self.space.widen(block, vectors)
            return [self.space.narrow(block, self._multiplied(operator, places, wide))]

        return self._sum(multiply, [vectors.shape])[0]

    def evaluate(self) -> tuple[Tensor, Tensor]:
        """Return the loss of all data and its gradient, flat, from one pass."""
        loss, gradient = self._sum(
            lambda operator, places: [operator.loss, self._grown(operator.gradient, places)],
            [(), (self.space.size,)],
        )
        return loss, gradient

    def probe(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, its gradient and the product with a vector that is always the same, from one pass."""
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(1, self.space.size, generator=generator, dtype=self.dtype).to(self.device)

        def compute(operator: LossOperator, places: Tensor | None) -> list[Tensor]:
            gradient = self._grown(operator.gradient, places)
            parts = [operator.loss, gradient, self._multiplied(operator, places, vector)]
            return [part.detach() for part in parts]

        loss, gradient, product = self._sum(compute, [(), (self.space.size,), vector.shape])
        return loss, gradient, product

    def _operators(self) -> Generator[tuple[Batch, LossOperator]]:
        num_batches = len(self.batches) if isinstance(self.batches, Sized) else None
        done = 0
        if self._begin_pass is not None:
            self._begin_pass()
        for batch in self.batches:
            batch = tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, Tensor) else leaf, batch)
            with self._autocast.restored():
                operator = self._operator_for(batch)
                try:
                    yield batch, operator
                finally:
                    operator.close()
            done += 1
            if isinstance(self.progress, Bar):
                self.progress.update(1)
            elif self.progress is not None:
                self.progress(done, num_batches)
        if not done and self._group is None:
            raise ValueError(f"{self.call}: the data has no batches.")

    def _sum(
        self,
        compute: Callable[[LossOperator, Tensor | None], list[Tensor]],
        shapes: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Add up over batches, and divide by what a mean divides by; of a group, a process may have nothing to add.

        Args:
            compute: The terms of a batch.
            shapes: Those of the terms.
        """
        totals: list[Tensor] = []
        divisor: float | Tensor | None = None
        for batch, operator in self._operators():
            count = self._count(batch, operator)
            if count is not None and not count:
                continue  # the mean over no data, as of labels that are all ignored, is nan
            terms = compute(operator, _places(self.space, operator.space, self.call))
            if count is not None:
                terms = [term * count for term in terms]
                divisor = count if divisor is None else divisor + count
            totals = [t + term for t, term in zip(totals, terms, strict=True)] if totals else terms
        has_terms = bool(totals)
        if self._group is not None:
            totals = totals or [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes]
            counts = torch.tensor(
                [float(has_terms), 0.0 if divisor is None else float(divisor)],
                dtype=torch.promote_types(self.dtype, torch.float32),
                device=self.device,
            )
            *totals, counts = sums([*totals, counts], self._group)
            num_processes, count = to_list(counts)
            has_terms, divisor = bool(num_processes), count or None
        if not has_terms:
            raise ValueError(
                f"{self.call}: no batch has data that count, so that there is no mean over them."
            )
        return totals if divisor is None else [total / divisor for total in totals]

    def _count(self, batch: Batch, operator: LossOperator) -> float | Tensor | None:
        if callable(self.reduction):
            return self.reduction(batch)
        if self.reduction is None:
            return operator.count
        return None if self.reduction == "sum" else num_data(self.call, batch)

    def _joint_space(self, params: Parameters) -> ParameterSpace:
        """Return the space of the rows that any batch looks up; without tables, that of the first batch."""
        rows: dict[str, Tensor] = {}
        operators = self._operators()
        for _, operator in operators:
            of_batch = {entry.name: entry.rows for entry in operator.space.entries if entry.rows is not None}
            if not of_batch:
                operators.close()
                break
            for name, found in of_batch.items():
                rows[name] = distinct(torch.cat([rows.get(name, found), found]))
        if self._group is not None:
            rows = unions(rows, self.device, self._group)
        return ParameterSpace(params, rows=rows)

    def _multiplied(self, operator: LossOperator, places: Tensor | None, vectors: Tensor) -> Tensor:
        return self._grown(operator.products(vectors if places is None else vectors[:, places]), places)

    def _grown(self, vector: Tensor, places: Tensor | None) -> Tensor:
        if places is None:
            return vector
        return vector.new_zeros(*vector.shape[:-1], self.space.size).index_add(-1, places, vector)


def num_data(call: str, batch: Batch) -> int:
    """Count the data of a batch by the first dimension of its first tensor."""
    tensors = tensors_in(batch)
    if not tensors or not tensors[0].ndim:
        raise ValueError(
            f"{call}: a batch of type {type(batch).__name__} does not begin with a tensor whose first dimension "
            'counts data. Pass reduction="sum", or a function that counts.'
        )
    return len(tensors[0])


def count_of(
    call: str, batch: Batch, known: OutputLoss | None, reduction: Reduction | None
) -> float | Tensor | None:
    """Return what the mean of a batch divides by; None if the loss is a sum."""
    if callable(reduction):
        return reduction(batch)
    if reduction not in (None, "mean", "sum"):
        raise ValueError(
            f'{call}: reduction must be "mean", "sum" or a function of the batch, got {reduction!r}.'
        )
    if known is not None:
        says = "sum" if known.count is None else "mean"
        if reduction not in (None, says):
            raise ValueError(f"{call}: reduction={reduction!r}, but the loss is a {says}.")
        return known.count
    if reduction is None:
        raise ValueError(
            f"{call}: the loss is not one of those with a closed form, so it must be said whether it is the mean or "
            'the sum over the data of a batch: pass reduction="mean" or "sum".'
        )
    return None if reduction == "sum" else num_data(call, batch)


def _places(outer: ParameterSpace, inner: ParameterSpace, call: str) -> Tensor | None:
    """Return where the coordinates of one batch are among those of all; None if they are the same."""
    if inner.is_same(outer):
        return None
    places: list[Tensor] = []
    for whole, part in zip(outer.entries, inner.entries, strict=True):
        start, width = outer.slices[whole.name].start, math.prod(part.shape[1:])
        index = torch.arange(part.shape[0] if part.shape else 1, device=outer.device)
        if part.rows is not None and whole.rows is not None:
            if not bool(torch.isin(part.rows, whole.rows).all()):
                raise ValueError(
                    f"{call}: a batch looks up rows of {whole.name!r} that no batch did before. The data must be the "
                    "same in every pass."
                )
            index = torch.searchsorted(whole.rows, part.rows)
        places.append(
            (start + index.unsqueeze(1) * width + torch.arange(width, device=outer.device)).flatten()
        )
    return torch.cat(places)


def refuse_moving(
    call: str,
    first: tuple[Tensor, Tensor, Tensor],
    second: tuple[Tensor, Tensor, Tensor],
    model: nn.Module | None,
    batches: Iterable[Tree],
) -> None:
    """Raise if loss, gradient and product of two passes differ by more than rounding.

    Args:
        call: How the error names the caller.
        first: What one pass gave.
        second: What the next did.
        model: Where to look for layers that may be the reason.
        batches: The data.

    Raises:
        ValueError: The root of the rounding unit is exceeded; what moved is named.
    """
    distances = [_distance(a, b) for a, b in zip(first, second, strict=True)]
    bound = torch.finfo(first[1].dtype).eps ** 0.5
    moved = [
        f"the {name} by {distance:.1e}"
        for name, distance in zip(("loss", "gradient", "product"), distances, strict=True)
        if not distance <= bound
    ]
    if moved:
        raise ValueError(
            f"{call}: two passes over the data differ, relatively: {', '.join(moved)}. {_reasons(model, batches)} To "
            "go on nevertheless, pass check_deterministic=False."
        )


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference, relative to the vectors; nan where either has one."""
    return float(
        linalg.vector_norm(a - b)
        / torch.maximum(linalg.vector_norm(a), linalg.vector_norm(b)).clamp(min=torch.finfo(a.dtype).tiny)
    )


def _reasons(model: nn.Module | None, batches: Iterable[Tree]) -> str:
    """Name what may have made two passes differ."""
    training = [(name or "the model", m) for name, m in (named_modules(model) if model else ()) if m.training]
    dropout = [f"{name} ({type(m).__name__})" for name, m in training if _has_dropout(m)]
    norms = [f"{name} ({type(m).__name__})" for name, m in training if isinstance(m, _torch.BatchNorm)]
    reasons: list[str] = []
    if dropout:
        reasons.append(f"In training mode {', '.join(dropout)} draws a mask each time: call .eval() on it.")
    if norms:
        reasons.append(
            f"In training mode {', '.join(norms)} normalises by the batch, so that it matters which data are in "
            "one: call .eval() on it, or fix the batches."
        )
    if isinstance(getattr(batches, "sampler", None), torch.utils.data.RandomSampler):
        reasons.append("The DataLoader shuffles: pass shuffle=False.")
    return " ".join(reasons) or (
        "Look for dropout or BatchNorm in training mode, random augmentation, and a loader that shuffles."
    )


def _has_dropout(module: nn.Module) -> bool:
    rate = getattr(module, "dropout", None)  # of attention and recurrent layers
    return isinstance(module, _torch.Dropout) or (isinstance(rate, float) and rate > 0)
