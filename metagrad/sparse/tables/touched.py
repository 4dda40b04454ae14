"""Find the rows of embedding tables that a model indexes, by a forward pass without side effects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from metagrad.core.capture import RandomState
from metagrad.core.checks import is_sequence, refuse
from metagrad.core.dispatch import Dispatch
from metagrad.core.substitution import own_buffers, replaced
from metagrad.core.tree import Tree, tensors_in
from metagrad.sparse.tables.table_proxy import TableProxy


def find_tables(call: str, model: nn.Module, sparse: Sequence[str]) -> dict[str, Tensor]:
    """Return embedding tables by name. Raise an error unless each name is a parameter [V, D]."""
    if isinstance(sparse, str) or not is_sequence(sparse):
        refuse(call, "a list of parameter names, such as ['item.weight']", sparse, TypeError)
    parameters = dict(model.named_parameters(remove_duplicate=False))  # tied tables by all of their names
    for name in sparse:
        if name not in parameters:
            raise ValueError(
                f"{call}: {name!r} is not a parameter of the model. Its parameters are {sorted(parameters)}."
            )
        if parameters[name].ndim != 2:
            refuse(f"{call}: {name!r}", "an embedding table [V, D]", tuple(parameters[name].shape))
    return {name: parameters[name] for name in sparse}


def touched_rows(
    model: nn.Module,
    tables: Mapping[str, Tensor],
    calls: Sequence[tuple[Tree, ...]],
    *,
    stacked: bool = False,
    call: Callable[..., object] = lambda model, *args: model(*args),
) -> dict[str, Tensor]:
    """Return the rows that calls of a model index.

    The model runs once for each call, without a graph, with its own parameters. Its buffers and all random generators
    are restored.

    Args:
        model: The model.
        tables: Parameters of the model by name, ``[V, D]`` each.
        calls: Positional arguments of each call. If ``stacked``, they have a leading task axis.
        stacked: True to find the rows of each task by ``torch.vmap``.
        call: Function that calls the model with these arguments.

    Returns:
        Ascending rows by name, ``[R]`` or ``[tasks, R]``. Shorter tasks repeat their last row.
    """
    with _left_alone(model):
        found = [_found_ids(functools.partial(call, model), model, tables, args, stacked) for args in calls]
    return {name: unique_rows(torch.cat([ids[name] for ids in found], -1)) for name in tables}


def unique_rows(ids: Tensor) -> Tensor:
    """Return sorted ids without duplicates, ``[..., n]`` to ``[..., R]`` with R of 1 or more.

    Shorter lists repeat their last row. Empty lists contain row 0.
    """
    if ids.shape[-1] == 0:
        return ids.new_zeros(*ids.shape[:-1], 1)
    ordered = ids.sort(-1).values
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    place = is_new.cumsum(-1) - 1
    rows = ordered[..., -1:].repeat(*[1] * (ids.ndim - 1), int(place.max()) + 1)
    return rows.scatter_(-1, place, ordered)


def _found_ids(
    called: Callable[..., object],
    model: nn.Module,
    tables: Mapping[str, Tensor],
    args: tuple[Tree, ...],
    stacked: bool,
) -> dict[str, Tensor]:
    def ids_of(*args: Tree) -> dict[str, Tensor]:
        found = {name: [torch.zeros(0, dtype=torch.long, device=p.device)] for name, p in tables.items()}
        proxies = {id(table): _noting(table, name, found[name].append) for name, table in tables.items()}
        with replaced(model, proxies), _ForwardGuard(tables):
            called(*args)
        return {name: torch.cat(ids) for name, ids in found.items()}

    with torch.no_grad():
        return torch.vmap(ids_of, randomness="different")(*args) if stacked else ids_of(*args)


def _noting(table: Tensor, name: str, note: Callable[[Tensor], None]) -> Tensor:
    """Return a proxy that looks up the table itself and records the ids."""
    # A tracer of the outer function must see that each call makes a new proxy.
    if has_torch_function((table,)):
        return handle_torch_function(_noting, (table,), table, name, note)
    source = table.detach()

    def lookup(ids: Tensor) -> Tensor:
        vectors = F.embedding(ids, source)
        note(ids.flatten().long())
        return vectors

    return TableProxy(name, source.shape, source, lookup)


class _ForwardGuard(Dispatch):
    """Restore generators that are arguments of functions, and raise ``ValueError`` for hidden tables.

    A table is hidden if the model stores it outside of the parameters of a module. Then it cannot be replaced.
    """

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(table): name for name, table in tables.items()}
        self.states: dict[torch.Generator, Tensor] = {}

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that takes no table."""
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self.names:
                raise ValueError(
                    f"sparse=[{self.names[id(tensor)]!r}]: the model uses the table by "
                    f"{getattr(function, '__name__', function)}, from a place that is not a parameter of a module, "
                    "where its rows cannot take its place. Leave it out of sparse, or give that use a parameter of "
                    "its own."
                )
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and generator not in self.states:
            self.states[generator] = generator.get_state()
        return function(*args, **kwargs)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for generator, state in self.states.items():
            generator.set_state(state)


@contextlib.contextmanager
def _left_alone(model: nn.Module) -> Generator[None]:
    """Restore the random generators and the buffers of a model."""
    random = RandomState()
    try:
        with own_buffers(model.modules()):
            yield
    finally:
        random.restore()
