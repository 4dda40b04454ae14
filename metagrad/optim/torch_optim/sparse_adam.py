"""Adam for embedding tables, whose gradients are row-sparse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.optim.first_order.adam import AdamRule
from metagrad.optim.rule import Rule
from metagrad.optim.torch_optim.move import Change
from metagrad.optim.torch_optim.optimizer import RuleOptimizer, Work
from metagrad.optim.torch_optim.state import ParameterState, apart, joined
from metagrad.sparse.tables.row_sparse import RowSparse, gather_rows


class SparseAdam(RuleOptimizer, rule=AdamRule, without=("weight_decay", "decoupled")):
    r"""Optimize embedding tables by Adam, exactly, at the cost of the rows touched so far.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= w_{t-1} - \eta \, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    A row that was ever touched moves at every step, because its momentum does. A row that never was stays, as in the
    dense optimizer. So the table equals that of ``torch.optim.Adam`` on dense gradients. ``torch.optim.SparseAdam``
    lets the averages of untouched rows stand still, and is another optimizer. The state holds the rows touched so
    far. Dense gradients are taken as well; ``torch.optim.Adam`` takes the same steps faster there.

    Raises:
        ValueError: A hyper-parameter is out of its range.
        TypeError: A parameter is complex, or a hyper-parameter is not a number.

    Example:
        >>> from metagrad.optim import SparseAdam
        >>> table = torch.nn.Embedding(1000, 2, sparse=True)
        >>> opt = SparseAdam(table.parameters(), lr=0.1)
        >>> table(torch.tensor([7, 7, 3])).square().sum().backward()
        >>> opt.step()
        >>> opt.state[table.weight]["rows"]
        tensor([3, 7])

    References:
        Kingma, Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1.
    """

    takes_rows = True

    def _moves(self, work: Work, rule: Any, kept: Mapping[str, ParameterState]) -> Iterator[Change]:
        """Compute a step; of a table that has had row-sparse gradients, one of its rows."""
        group, params, grads = work
        tables = {key for key, g in grads.items() if isinstance(g, RowSparse) or "rows" in kept[key]}
        for key in tables:
            yield step_rows(rule, key, params[key], grads[key], kept[key])
        dense = ({key: each[key] for key in params if key not in tables} for each in (params, grads))
        yield from super()._moves(Work(group, *dense), rule, kept)


def step_rows(rule: Rule, key: str, table: Tensor, gradient: Tensor, kept: ParameterState) -> Change:
    """Compute a step of the rows of a table that were ever touched, which is what the dense rule moves.

    The state has a slot ``rows``, int64 and ascending. Every other slot holds only these rows.
    """
    known = _known_rows(kept, table)
    touched = (
        gradient.rows if isinstance(gradient, RowSparse) else torch.arange(len(table), device=table.device)
    )
    rows = torch.unique(torch.cat([known, touched]))
    values = {key: widened(table.index_select(0, rows))}
    state = rule.init(values)
    if "step" in kept:
        state = joined(rule, {key: _grown(state, key, kept, torch.searchsorted(rows, known))}, values)
    own = gather_rows(gradient, rows, unique=True) if isinstance(gradient, RowSparse) else gradient
    moved, state = rule.update({key: widened(own)}, state, values)
    return Change({key: table}, moved, {key: {**apart(state, [key])[key], "rows": rows}}, rows)


def _known_rows(kept: ParameterState, table: Tensor) -> Tensor:
    """Return the rows that the state holds: of a table whose gradients were dense, all of them."""
    if "step" not in kept:
        return torch.empty(0, dtype=torch.int64, device=table.device)
    return kept["rows"] if "rows" in kept else torch.arange(len(table), device=table.device)


def _grown(fresh: object, key: str, kept: ParameterState, places: Tensor) -> ParameterState:
    """Put what is kept of rows into the state of more of them."""
    grown = dict(kept)
    for field, value in fresh._asdict().items():  # type: ignore[attr-defined]
        if isinstance(value, dict):
            grown[field] = value[key].index_copy(0, places, kept[field]) if field in kept else value[key]
    return grown
