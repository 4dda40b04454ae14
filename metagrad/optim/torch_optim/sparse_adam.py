"""Adam for embedding tables, whose gradients are row-sparse."""

from __future__ import annotations

from collections.abc import Iterator

from metagrad.core.tree import Params
from metagrad.optim.first_order.adam import AdamRule
from metagrad.optim.torch_optim.optimizer import RuleOptimizer, Work
from metagrad.optim.torch_optim.sparse_gradients import step_rows
from metagrad.optim.torch_optim.state import Change
from metagrad.sparse.tables.row_sparse import RowSparse


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

    def _changes(self, work: Work) -> Iterator[Change]:
        """Compute a step; of a table that has had row-sparse gradients, one of its rows."""
        group, params, grads = work
        dense: tuple[Params, Params] = ({}, {})
        for key, p in params.items():
            kept, g = self.state.get(p, {}), grads[key]
            if isinstance(g, RowSparse) or "rows" in kept:
                yield step_rows(self._rule(group), key, p, g, kept)
            else:
                dense[0][key], dense[1][key] = p, g
        yield from super()._changes(Work(group, *dense))
