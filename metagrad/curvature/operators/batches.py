"""Operators of data in batches: the exact sum, with the graph of one batch at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core._torch import linalg, named_modules
from metagrad.core.capture import AutocastState
from metagrad.core.checks import is_list_or_tuple, progress, refuse
from metagrad.core.tree import Tree, plain_dicts, tensors_in, tree_map_only
from metagrad.curvature.likelihoods import OutputLoss
from metagrad.curvature.operators.operator import GraphOperator, Operator
from metagrad.curvature.operators.space import ParameterSpace

Batch: TypeAlias = Tree
"""The arguments of a loss in addition to the parameters: a tuple such as ``(x, y)``, or a list of tensors."""

Reduction: TypeAlias = "Literal['mean', 'sum'] | Callable[[Batch], float]"
"""How the loss of a batch reduces its terms."""


def is_one_batch(data: object) -> bool:
    """Return whether data are one batch, and not an iterable of batches.

    A tensor, a tuple (named or not) and a list of tensors are one batch. Every other iterable holds batches, such as
    a list of tuples or a ``DataLoader``.
    """
    if is_list_or_tuple(data):
        return isinstance(data, tuple) or (bool(data) and isinstance(data[0], Tensor))
    return isinstance(data, (Tensor, Mapping)) or not isinstance(data, Iterable)


def refuse_iterator(call: str, batches: Iterable[Batch]) -> None:
    """Raise ``TypeError`` for batches that can be iterated over only once."""
    if isinstance(batches, Iterator):
        raise TypeError(
            f"{call}: the data is a {type(batches).__name__}, which is consumed by one pass, but every product "
            "takes one. Give a list of batches, a DataLoader, or another object whose __iter__ starts again."
        )


def each_batch(call: str, data: Batch | Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches of data on a device."""
    for batch in progress([data] if is_one_batch(data) else data, call):
        yield tree_map_only(Tensor, lambda leaf: leaf.to(device), plain_dicts(batch))


class BatchedOperator(Operator):
    r"""The exact operator of data in batches, with the graph of one batch at a time.

    .. math:: A = \sum_b \frac{n_b}{\sum_{b'} n_{b'}} A_b, \qquad\text{or}\qquad A = \sum_b A_b

    The first formula holds if the losses are means of :math:`n_b` terms each, the second if they are sums. Every
    product goes through all batches once, however many vectors are multiplied together, so multiply many at a time.
    Products are taken at the current values of the parameters.

    Args:
        call: Name of the caller in errors.
        space: The parameters.
        operator_for: Makes the operator of a batch, which is closed before the operator of the next batch is made.
            Its ``count`` is :math:`n_b`, or None for a sum.
        batches: An iterable that yields the same batches every time. Tensors are moved to the device of the
            parameters.
        begin_pass: Called before each pass, so that all passes draw the same random numbers.

    Raises:
        TypeError: ``batches`` is an iterator, which is consumed by one pass.
    """

    def __init__(
        self,
        call: str,
        space: ParameterSpace,
        operator_for: Callable[[Batch], GraphOperator],
        batches: Iterable[Batch],
        begin_pass: Callable[[], None] | None = None,
    ) -> None:
        refuse_iterator(call, batches)
        super().__init__(space)
        self.call = call
        self.batches = batches
        self._operator_for = operator_for
        self._begin_pass = begin_pass
        # Products may be computed under another autocast state, but the model runs under the present one.
        self._autocast = AutocastState()

    def _products(self, vectors: Tensor) -> Tensor:
        return self._sum(lambda operator: [operator.multiply(vectors)])[0]

    def restricted(self, block: ParameterSpace) -> Operator:
        """Return the diagonal block of some parameters."""

        def operator_for(batch: Batch) -> GraphOperator:
            return self._operator_for(batch).restricted(block)

        part = copy.copy(self)
        part.space, part._pairs, part._operator_for = block, [], operator_for
        return part

    def probe(self) -> list[Tensor]:
        """Return the loss, its gradient and the product with a fixed vector, from one pass."""
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(1, self.space.size, generator=generator, dtype=self.dtype).to(self.device)

        def compute(operator: GraphOperator) -> list[Tensor]:
            parts = operator.loss, operator.gradient, operator.multiply(vector)
            return [part.detach() for part in parts]

        return self._sum(compute)

    def _operators(self) -> Generator[GraphOperator]:
        if self._begin_pass is not None:
            self._begin_pass()
        for batch in each_batch(self.call, self.batches, self.device):
            with self._autocast.restored():
                operator = self._operator_for(batch)
                operator._pairs = None  # images of a batch may be only rounding errors, the sum is compared
                try:
                    yield operator
                finally:
                    operator.close()

    def _sum(self, compute: Callable[[GraphOperator], list[Tensor]]) -> list[Tensor]:
        """Add the terms of all batches, and divide by the total count if the losses are means."""
        totals: list[Tensor] = []
        divisor: float | Tensor | None = None
        for operator in self._operators():
            count = operator.count
            if count is not None and not count:
                continue  # the mean over no data is nan, as if all labels are ignored
            terms = compute(operator)
            if count is not None:
                terms = [term * count for term in terms]
                divisor = count if divisor is None else divisor + count
            totals = [t + term for t, term in zip(totals, terms, strict=True)] if totals else terms
        if not totals:
            raise ValueError(
                f"{self.call}: no batch has data that count, so that there is no mean over them."
            )
        return totals if divisor is None else [total / divisor for total in totals]


def num_data(call: str, batch: Batch) -> int:
    """Return the number of data in a batch: the first dimension of its first tensor."""
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
    """Return the divisor of the mean of a batch. None if the loss is a sum."""
    if callable(reduction):
        return reduction(batch)
    if reduction not in (None, "mean", "sum"):
        refuse(f"{call}: reduction", '"mean", "sum" or a function of the batch', reduction)
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


def checked_deterministic(operator: BatchedOperator, model: nn.Module | None = None) -> BatchedOperator:
    """Return ``operator``. Raise ``ValueError`` if two passes differ by more than rounding.

    Args:
        operator: The operator.
        model: The model. The error names its layers that may be the reason, such as dropout.
    """
    passes = zip(("loss", "gradient", "product"), operator.probe(), operator.probe(), strict=True)
    distances = {name: _distance(first, second) for name, first, second in passes}
    bound = torch.finfo(operator.dtype).eps ** 0.5
    moved = [f"the {name} by {distance:.1e}" for name, distance in distances.items() if not distance <= bound]
    if moved:
        raise ValueError(
            f"{operator.call}: two passes over the data differ, relatively: {', '.join(moved)}. "
            f"{_reasons(model, operator.batches)}"
        )
    return operator


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference relative to the larger vector.

    It is nan if either vector contains nan.
    """
    larger = torch.maximum(linalg.vector_norm(a), linalg.vector_norm(b))
    return float(linalg.vector_norm(a - b) / larger.clamp(min=torch.finfo(a.dtype).tiny))


def _reasons(model: nn.Module | None, batches: Iterable[Tree]) -> str:
    """Return a sentence on what may have made two passes differ."""
    training = [(name or "the model", m) for name, m in (named_modules(model) if model else ()) if m.training]
    found = [f"{name} ({type(m).__name__}) in training mode" for name, m in training if varies(m)]
    if isinstance(getattr(batches, "sampler", None), torch.utils.data.RandomSampler):
        found.append("a DataLoader that shuffles")
    likely = ", ".join(found) or "dropout or BatchNorm in training mode, or a loader that shuffles"
    return f"Look for {likely}, and for random augmentation. Call model.eval() and fix the batches."


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def varies(module: nn.Module) -> bool:
    """Return whether a module in training mode drops activations, or normalizes by its batch."""
    rate = getattr(module, "dropout", None)  # of attention and recurrent layers
    return isinstance(module, (*_DROPOUT, _torch.BatchNorm)) or (isinstance(rate, float) and rate > 0)
