"""Embedding tables adapted by the rows that are looked up: the cost does not know how long a table is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from metagrad.core.substitution import replaced
from metagrad.sparse.tables.embedding import embedding
from metagrad.sparse.tables.table_proxy import LocalRows
from metagrad.sparse.tables.touched import touched_rows

Params = dict[str, Tensor]


@dataclass(frozen=True)
class SwappedTables:
    """A model as a pure function of parameters in which tables are represented by some of their rows.

    Attributes:
        params: The parameters, tables replaced by the rows looked up, ``[R, D]``, on the tape of the tables,
            whose gradients arrive as :class:`RowSparse`; of stacked tasks ``[tasks, ...]`` each.
        rows: Which rows these are, by name, ``[R]`` or ``[tasks, R]``, ascending; where a task has fewer than
            another, its last is repeated, and only the first of equals is looked up.

    Example:
        >>> table = torch.nn.Embedding(1000, 1)
        >>> ids = torch.tensor([[8, 3], [5, 5]])
        >>> swapped = metagrad.sparse.swap_tables(
        ...     table, dict(table.named_parameters()), sparse=["weight"], batch=ids, stacked=True)
        >>> swapped.rows["weight"].tolist(), swapped.params["weight"].shape
        ([[3, 8], [5, 5]], torch.Size([2, 2, 1]))
        >>> torch.equal(swapped(swapped.params, ids), table(ids))
        True
    """

    params: Params
    rows: Params
    model: nn.Module = field(repr=False)
    stacked: bool = field(repr=False)

    def __call__(self, params: Params, *args: Tensor) -> Tensor:
        """Call the model with other values for some or all of its parameters.

        Args:
            params: In the form of :attr:`params`. Of stacked tasks, every tensor has a leading task axis;
                parameters that are left out are the model's own.
            *args: The arguments of the model; of stacked tasks ``[tasks, ...]``.

        Returns:
            What the model returns, of stacked tasks ``[tasks, ...]``.

        Raises:
            ValueError: A row of a table is looked up that is not among :attr:`rows`, or a table is used
                otherwise than by a lookup.
        """
        if self.stacked:
            return torch.vmap(self._call, randomness="different")(self.rows, params, args)
        return self._call(self.rows, params, args)

    def _call(self, rows: Params, params: Params, args: tuple[Tensor, ...]) -> Tensor:
        slots = named_tensors(self.model)
        values = {
            id(slots[name]): LocalRows(name, tuple(slots[name].shape), rows[name], value).stand_in()
            if name in rows
            else value
            for name, value in params.items()
        }
        with replaced(self.model, values):
            return self.model(*args)


def swap_tables(
    model: nn.Module,
    params: Mapping[str, Tensor],
    *,
    sparse: Sequence[str],
    batch: Tensor | Sequence[Tensor],
    stacked: bool = False,
) -> SwappedTables:
    r"""Represent embedding tables by the rows that a batch looks up.

    .. math:: f(T; \mathrm{ids}) = f(T[\mathrm{rows}];\ \mathrm{searchsorted}(\mathrm{rows}, \mathrm{ids})),
        \qquad \mathrm{rows} = \mathrm{unique}(\mathrm{ids})

    What is adapted in an inner loop is then a small dense tensor, and no step costs what the table would. The
    model stays as it is: while it runs, a tensor without memory stands in the table's place, and sends
    ``F.embedding`` and ``F.embedding_bag`` (so ``nn.Embedding`` and ``nn.EmbeddingBag``, whatever their
    ``sparse`` flag says) to the rows. Every other use of the table is refused.

    The rows are found by calling the model once on the batch, without graph, and noting what it looks up. No
    rule about its inputs is needed so: ids may be computed, tables may be looked up twice and in nested modules.
    Buffers and random generators are left as they were; hooks run, and Python attributes that ``forward`` sets
    are set. A lookup of any other row later raises.

    Args:
        model: The model; its own parameters are never written to.
        params: Its parameters by name, as ``dict(model.named_parameters())`` gives them.
        sparse: The names of the tables, ``[V, D]`` each.
        batch: The positional arguments of the model, or its only one.
        stacked: Whether the batch has a leading task axis; each task then has rows of its own, and the model is
            called under ``torch.vmap``.

    Returns:
        The rows, and the model as a function of them.

    Raises:
        ValueError: A name is not a parameter of the model or not in ``params``, a table is not ``[V, D]``, or the
            model uses one otherwise than by a lookup, with ``max_norm`` or with ``scale_grad_by_freq``.
        TypeError: ``sparse`` is a string.

    Note:
        ``torch.utils.checkpoint`` inside the model recomputes with the table in its place, and is wrong, as it
        is under ``torch.func.functional_call``; ``metagrad.checkpoint`` around a lookup raises.

    Example:
        One step on :math:`\tfrac12 |T_7|^2` halves row 7, the only one of a million that is there:

        >>> table = torch.nn.Embedding(1_000_000, 2, _weight=torch.ones(1, 2).expand(1_000_000, 2))
        >>> params = dict(table.named_parameters())
        >>> swapped = metagrad.sparse.swap_tables(
        ...     table, params, sparse=["weight"], batch=torch.tensor([7, 7]))
        >>> swapped.rows["weight"].tolist(), swapped.params["weight"].shape
        ([7], torch.Size([1, 2]))
        >>> loss = swapped(swapped.params, torch.tensor([7])).square().sum() / 2
        >>> grads = metagrad.grad(loss, swapped.params, create_graph=True)
        >>> adapted = {"weight": swapped.params["weight"] - 0.5 * grads["weight"]}
        >>> swapped(adapted, torch.tensor([7])).tolist()
        [[0.5, 0.5]]

    References:
        Finn, Abbeel, Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", ICML 2017,
        equation 1, restricted to the coordinates in which its gradient is not zero.
    """
    tables = find_tables("swap_tables(..., sparse)", model, sparse)
    missing = [name for name in tables if name not in params]
    if missing:
        raise ValueError(
            f"swap_tables(model, params, sparse): params has no entry for {missing}. Give it that of the model."
        )
    call = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    rows = touched_rows(model, tables, [call], stacked=stacked)
    num_tasks = (call[0].shape[0],) if stacked else ()
    local = {
        name: embedding(rows[name], p) if name in rows else p.expand(*num_tasks, *p.shape)
        for name, p in params.items()
    }
    return SwappedTables(local, rows, model, stacked)


def named_tensors(model: nn.Module) -> Params:
    """Return the parameters by all of their names; tied ones have several."""
    return dict(model.named_parameters(remove_duplicate=False))


def find_tables(call: str, model: nn.Module, sparse: Sequence[str]) -> Params:
    """Find tables by name, and refuse what is none."""
    if isinstance(sparse, str):
        raise TypeError(
            f"{call}: expected a list of parameter names, got the string {sparse!r}; write [{sparse!r}]."
        )
    parameters = named_tensors(model)
    for name in sparse:
        if name not in parameters:
            raise ValueError(
                f"{call}: {name!r} is not a parameter of the model. Its parameters are {sorted(parameters)}."
            )
        if parameters[name].ndim != 2:
            raise ValueError(
                f"{call}: {name!r} must be an embedding table [V, D], got shape {tuple(parameters[name].shape)}."
            )
    return {name: parameters[name] for name in sparse}
