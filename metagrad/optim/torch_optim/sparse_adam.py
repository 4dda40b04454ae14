"""Adam for embedding tables, whose gradients are row-sparse."""

from __future__ import annotations

from collections.abc import Iterator

from metagrad.core.tree import Params
from metagrad.optim.first_order.adam import AdamRule
from metagrad.optim.torch_optim.optimizer import ParamsWithGrad, RuleOptimizer
from metagrad.optim.torch_optim.sparse_gradients import step_rows
from metagrad.optim.torch_optim.state import PendingUpdate
from metagrad.sparse.tables.row_sparse import RowSparse


class SparseAdam(RuleOptimizer, rule=AdamRule, without=("weight_decay", "decoupled")):
    r"""Optimize embedding tables by exact Adam, at the cost of the rows that had a gradient so far.

    .. math::
        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2 \\
        w_t &= w_{t-1} - \eta \, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    After its first gradient, a row changes at every step, because of its momentum. Other rows do not change,
    as in the dense optimizer. So the table equals a table trained by ``torch.optim.Adam`` on dense gradients.
    ``torch.optim.SparseAdam`` is a different optimizer, which freezes the averages of rows without a gradient. The
    state holds only the rows that had a gradient. Dense gradients are supported, but ``torch.optim.Adam`` is faster
    for them.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own hyperparameters.
        lr: The learning rate :math:`\eta`.
        betas: Decay rates of the averages of gradients and of their squares, each from 0 to below 1.
        eps: Added to the square root in the denominator. It bounds the step where gradients vanish.
        eps_root: Added inside the square root, as in optax. It makes a training smooth in its data and
            hyperparameters.
        amsgrad: Divide by the root of the largest :math:`v` so far, instead of the root of :math:`v`.
        maximize: Maximize the loss: negate the gradient.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite, or a matrix cannot be
            factorized. ``"raise"`` raises an error. ``"skip"`` leaves the step out and counts it in ``opt.stats``.
            Parameters and state do not change.

    Raises:
        ValueError: A hyperparameter is out of its range.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

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

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        """Compute a step. A table that has received row-sparse gradients updates only its rows."""
        group, params, grads = work
        dense: tuple[Params, Params] = ({}, {})
        for key, p in params.items():
            kept, g = self.state.get(p, {}), grads[key]
            if isinstance(g, RowSparse) or "rows" in kept:
                yield step_rows(self._rule(group), key, p, g, kept)
            else:
                dense[0][key], dense[1][key] = p, g
        yield from super()._updates(ParamsWithGrad(group, *dense))
