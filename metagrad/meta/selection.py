"""Select the adapted parameters of a model by name, pattern, module or predicate."""

from __future__ import annotations

import fnmatch
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

Adapt: TypeAlias = "str | nn.Module | Sequence[str | nn.Module] | Callable[[str, nn.Parameter], bool] | None"
"""Names, patterns and modules, or a predicate of a name and a parameter. None selects all parameters."""

_CALL = "MAML(..., adapt)"


def select_parameters(model: nn.Module, adapt: Adapt, trained: Mapping[str, Any]) -> list[str]:
    """Return the names of the adapted parameters, in the order of the model.

    A tied parameter has several names. It is adapted if one name is selected and no name is excluded.

    Args:
        model: The model.
        adapt: The argument of :class:`MAML`.
        trained: The parameters of the model that require grad.

    Raises:
        ValueError: If a part of ``adapt`` matches no parameter, or no parameter remains.
        TypeError: If ``adapt`` has another type.
    """
    if adapt is None:
        return list(trained)
    if callable(adapt) and not isinstance(adapt, nn.Module):
        chosen = [name for name, parameter in trained.items() if adapt(name, parameter)]
    else:
        chosen = _chosen(model, _terms(adapt), list(trained))
    if not chosen:
        raise ValueError(f"{_CALL}: chooses none of the parameters that require grad: {list(trained)}.")
    return chosen


def _terms(adapt: object) -> list[str | nn.Module]:
    terms = [adapt] if isinstance(adapt, (str, nn.Module)) else adapt
    if not isinstance(terms, Collection) or not all(isinstance(t, (str, nn.Module)) for t in terms):
        raise TypeError(
            f"{_CALL}: expected None, a name, a pattern such as 'head.*' or '!head.*', a module of the model, a list "
            f"of these, or a predicate (name, parameter) -> bool, got {reprlib.repr(adapt)}."
        )
    return list(terms)


def _chosen(model: nn.Module, terms: list[str | nn.Module], trained: list[str]) -> list[str]:
    # If all parts exclude parameters, all other parameters are selected.
    chosen = set(trained) if terms and all(map(_is_excluding, terms)) else set[str]()
    excluded = set[str]()
    for term in terms:
        (excluded if _is_excluding(term) else chosen).update(parameters_of(_CALL, model, term, trained))
    return [name for name in trained if name in chosen - excluded]


def _is_excluding(term: str | nn.Module) -> bool:
    return isinstance(term, str) and term.startswith("!")


def parameters_of(
    call: str, model: nn.Module, term: str | nn.Module, trained: Collection[str], kind: str = "require grad"
) -> set[str]:
    """Return the names of the parameters that match a name, a pattern or a module.

    Args:
        call: Name of the caller in error messages.
        model: The model.
        term: The name, pattern or module.
        trained: The names of the parameters that may match.
        kind: A property of these parameters, for errors.

    Raises:
        ValueError: If no parameter matches.
    """
    if isinstance(term, nn.Module):
        own = {id(p) for p in term.parameters()}
        every = {name for name, p in model.named_parameters() if id(p) in own}
        shown = f"the module {type(term).__name__}"
    else:
        pattern, shown = term.removeprefix("!"), repr(term)
        names = _all_names(model).items()
        every = {name for name, aliases in names if any(_matches(pattern, a) for a in aliases)}
    found = every.intersection(trained)
    if not found:
        why = f"does not {kind}" if every else "matches no parameter of the model"
        raise ValueError(f"{call}: {shown} {why}. The parameters that {kind} are {list(trained)}.")
    return found


def _matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name, or is the name of a module that contains it."""
    return name.startswith(f"{pattern}.") or name == pattern or fnmatch.fnmatchcase(name, pattern)


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by its first name."""
    first = {id(p): name for name, p in model.named_parameters()}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, p in model.named_parameters(remove_duplicate=False):
        names[first[id(p)]].append(name)
    return names
