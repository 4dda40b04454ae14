"""Rules for embedding tables: the rows touched so far are updated, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad.optim.curvature import Diagonal, KnownDiagonal
from metagrad.optim.hyperparameters import is_used
from metagrad.optim.rule import Params, Rule, RuleNode
from metagrad.sparse.tables.row_sparse import RowSparse, gather_rows
from metagrad.sparse.tables.row_table import RowTable


class RowwiseState(NamedTuple):
    """The state of :class:`Rowwise`.

    Attributes:
        step: Steps taken.
        base: The tables before the first step, ``[V, D...]``.
        state: The state of the rule, of row tables.
        scales: What rows never touched are multiplied by, ``[D...]``; None without decay.
        scale_state: The state of the rule of these; None without decay.
        versions: How often the base was written into; with decay it must not be.
    """

    step: int
    base: Params
    state: Any
    scales: Params | None
    scale_state: Any
    versions: dict[str, int]


@dataclass(frozen=True, eq=False)
class Rowwise(RuleNode):
    """The rule that :func:`rowwise` makes."""

    rule: Rule

    nested = ("rule",)

    def __post_init__(self) -> None:
        if not hasattr(self.rule, "decays_linearly"):
            raise TypeError(
                "rowwise(rule): expected sgd, adam, adamw, adagrad, rmsprop, adadelta or lion, or a rule with their "
                f"attribute decays_linearly, got {type(self.rule).__name__}, which does not move rows one by one."
            )
        if self._decays and not self.rule.decays_linearly:  # type: ignore[reportAttributeAccessIssue]
            raise ValueError(
                f"rowwise(rule): with weight decay in its gradients, {type(self.rule).__name__} moves every row in "
                "its own way, touched or not. Use adamw, lion or sgd, or no weight decay."
            )

    @property
    def _decays(self) -> bool:
        return is_used(self.rule.weight_decay)  # type: ignore[reportAttributeAccessIssue]

    def init(self, params: Params) -> RowwiseState:
        """Return the state before the first step; ``params`` are strided tables ``[V, D...]``."""
        for key, table in params.items():
            if type(table) in (RowSparse, RowTable) or table.ndim < 2:
                raise ValueError(
                    f"rowwise(rule).init: params[{key!r}] must be a strided table [V, D...], got "
                    f"{type(table).__name__} of shape {tuple(table.shape)}."
                )
        units = {key: table.new_ones(table.shape[1:]) for key, table in params.items()}
        state = self.rule.init(units)
        self._check_zero_gradient(units, state)
        scales, scale_state = (units, state) if self._decays else (None, None)
        nothing = {
            key: torch.empty(0, dtype=torch.int64, device=table.device) for key, table in params.items()
        }

        def untouched(key: str, unit: Tensor) -> Tensor:
            table = params[key]
            values = unit.new_empty((0, *unit.shape))
            if self._decays:
                return RowTable(table, nothing[key], values, unit)
            return RowTable(unit.expand(table.shape), nothing[key], values)

        versions = {key: table._version for key, table in params.items()}
        return RowwiseState(0, dict(params), _map_tables(untouched, state), scales, scale_state, versions)

    def update(
        self, grads: Params, state: RowwiseState, params: Params, curvature: object | None = None
    ) -> tuple[Params, RowwiseState]:
        """Take one step; the new parameters are row tables, and ``curvature`` is taken at their rows."""
        for key in params:
            _check_step(key, grads[key], state, params[key])
        rows = {key: _union(grads[key], params[key]) for key in params}

        def at_rows(key: str, table: Tensor) -> Tensor:
            return gather_rows(table, rows[key], unique=True)

        news, new_state = self.rule.update(
            {key: at_rows(key, grads[key]) for key in params},
            _map_tables(at_rows, state.state),
            {key: at_rows(key, table) for key, table in params.items()},
            None if curvature is None else _RowDiagonal(curvature, rows),
        )
        scales, scale_state = state.scales, state.scale_state
        if scales is not None:
            zeros = {key: torch.zeros_like(scale) for key, scale in scales.items()}
            scales, scale_state = self.rule.update(zeros, scale_state, scales, KnownDiagonal(zeros))

        def overlaid(key: str, values: Tensor, old: Tensor, scale: Tensor | None = None) -> Tensor:
            # Without decay what a state holds of untouched rows is a constant.
            base = old.base if scale is None else state.base[key]  # type: ignore[reportAttributeAccessIssue]
            return RowTable(base, rows[key], values, scale)

        tables: Params = {
            key: RowTable(state.base[key], rows[key], values, None if scales is None else scales[key])
            for key, values in news.items()
        }
        others = (state.state,) if scales is None else (state.state, scale_state)
        new_state = _map_tables(overlaid, new_state, *others)
        return tables, state._replace(
            step=state.step + 1, state=new_state, scales=scales, scale_state=scale_state
        )

    def _check_zero_gradient(self, units: Params, state: Any) -> None:
        """Check that the rule does not move a row whose gradient is zero, other than by weight decay."""
        with torch.no_grad():
            zeros = {key: torch.zeros_like(unit) for key, unit in units.items()}
            moved, _ = self.rule.update(zeros, state, units, KnownDiagonal(zeros))
        for key, unit in units.items():
            if not bool(moved[key].isfinite().all()) or not (self._decays or torch.equal(moved[key], unit)):
                raise ValueError(
                    f"rowwise(rule).init: {type(self.rule).__name__} moves a row of {key!r} whose gradient is zero, "
                    f"from 1 to {moved[key].flatten()[0].item()}. Is eps 0? It must be above."
                )


def rowwise(rule: Rule) -> Rowwise:
    r"""Make the exact row-wise form of a rule, for embedding tables whose gradients are :class:`RowSparse`.

    Every row that was ever touched is updated at every step, since momentum moves a row without a gradient too;
    a row that was not is left in the base, times a factor where weights decay. So the tables are those of the
    dense rule, and a step costs the rows touched so far, in time and memory, however many rows there are.

    Without weight decay the result is the dense rule's, bit for bit: the same operations on the same numbers.
    With it, the factor is a product that the dense rule takes one multiplication at a time, and results are equal
    to rounding. Weight decay must be linear in the weights: of ``sgd``, or decoupled (``adamw``, ``lion``).

    New parameters are :class:`RowTable`, which :func:`embedding` looks up, and whose ``write_()`` writes them back
    into the table; they and the state are differentiable, and keep their structure in :func:`metagrad.unroll`.

    Args:
        rule: ``sgd``, ``adam``, ``adamw``, ``adagrad``, ``rmsprop``, ``adadelta``, ``lion``, ``adahessian`` or
            ``sophia_h``. Hyper-parameters with a value for each element of a parameter have the shape of a row,
            ``[D...]``.

    Returns:
        A frozen rule with ``init(params)`` and ``update(grads, state, params)``, for tables alone: in a model,
        ``mask(rowwise(rule), tables, other=rule)``.

    Raises:
        ValueError: The rule decays weights through its gradients' squares; in ``init``, it moves rows whose
            gradient is zero (``eps=0``), or a parameter is not a strided table; in ``update``, parameters are
            not those of the last step.
        TypeError: The rule is of an unknown kind; in ``update``, a gradient is not RowSparse.

    Example:
        >>> from metagrad.optim.first_order.rowwise import rowwise
        >>> from metagrad.sparse.tables.embedding import embedding
        >>> params = {"table": torch.ones(1000, 2, requires_grad=True)}
        >>> rule = rowwise(metagrad.optim.rules.sgd(lr=0.25, momentum=0.5))
        >>> state = rule.init(params)
        >>> loss = embedding(torch.tensor([7, 7]), params["table"]).sum()
        >>> params, state = rule.update(metagrad.grad(loss, params), state, params)
        >>> params["table"].rows, params["table"].values
        (tensor([7]), tensor([[0.5000, 0.5000]], grad_fn=<_GatherRowsBackward>))

    References:
        The lazy alternative, which lets the moments of untouched rows stand still and is another optimizer, is
        ``torch.optim.SparseAdam``.
    """
    return Rowwise(rule)


class _RowDiagonal(KnownDiagonal):
    """A diagonal at some rows of tables; outside of the rows of a gradient it is zero."""

    def __init__(self, curvature: object, rows: dict[str, Tensor]) -> None:
        self._curvature = curvature
        self._rows = rows

    def diagonal(self, request: Diagonal) -> Params:
        """Estimate, and choose the rows."""
        found = self._curvature.diagonal(request)  # type: ignore[reportAttributeAccessIssue]
        return {key: gather_rows(table, self._rows[key], unique=True) for key, table in found.items()}


def _union(gradient: Tensor, table: Tensor) -> Tensor:
    assert isinstance(gradient, RowSparse)
    if not isinstance(table, RowTable):
        return gradient.rows
    return torch.unique(torch.cat([gradient.rows, table.rows]))


def _map_tables(function: Callable[..., Tensor], state: Any, *others: Any) -> Any:
    """Map what a rule's state holds for each parameter; the other fields, such as the step, pass."""
    return type(state)(
        *(
            {key: function(key, item, *(o[key] for o in aligned)) for key, item in field.items()}
            if isinstance(field, dict)
            else field
            for field, *aligned in zip(state, *others, strict=True)
        )
    )


def _check_step(key: str, gradient: Tensor, state: RowwiseState, table: Tensor) -> None:
    if not isinstance(gradient, RowSparse):
        raise TypeError(
            f"rowwise(rule).update: the gradient of {key!r} must be RowSparse, as embedding(ids, table) gives it, "
            f"got {type(gradient).__name__} of shape {tuple(gradient.shape)}. Give other parameters the rule itself."
        )
    base = table.base if isinstance(table, RowTable) else table
    known = state.base.get(key)
    same = known is not None and base.shape == known.shape and base.data_ptr() == known.data_ptr()
    if not same or isinstance(table, RowTable) != (state.step > 0):
        raise ValueError(
            f"rowwise(rule).update: params[{key!r}] must be the table that init was given, and after the first step "
            "what the last update returned. Call init on a table that you changed."
        )
    if state.scales is not None and base._version != state.versions[key]:
        raise ValueError(
            f"rowwise(rule).update: the base of params[{key!r}] was written into since init, by write_() for "
            "instance, and its rows would decay a second time. Call init again."
        )
