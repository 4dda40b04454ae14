"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import metagrad

ROOT = Path(metagrad.__file__).parents[1]
MODULES = [info.name for info in pkgutil.walk_packages(metagrad.__path__, "metagrad.")]


def has_examples(name):
    file = ROOT.joinpath(*name.split("."))
    return ">>>" in (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()


WITHOUT_EXAMPLES = doctest.DocTestFinder(exclude_empty=True)


@pytest.mark.parametrize("name", [name for name in MODULES if has_examples(name)])
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch, "metagrad": metagrad})
    assert results.failed == 0


def test_every_module_can_be_imported():
    for name in MODULES:
        importlib.import_module(name)


ROOMS = [
    *(room for name in metagrad.__all__ if inspect.ismodule(room := getattr(metagrad, name))),
    metagrad.optim.rules,
]
PUBLIC = {
    value
    for room in ROOMS
    for value in map(vars(room).get, room.__all__)
    if callable(value) and value.__module__.startswith("metagrad.")
}
WITH_EXAMPLES = {value for value in PUBLIC if ">>>" in (value.__doc__ or "")}
NAMED = re.compile(r":(?:class|func|meth):`~?([\w.]+)`|``([\w.]+)")


def is_plain(value) -> bool:
    """Return whether there is nothing to show: a protocol, a tuple of values, an exception."""
    return getattr(value, "_is_protocol", False) or issubclass(value, (tuple, Exception))


def is_shown_elsewhere(value) -> bool:
    """Return whether a docstring names what makes the value, and has an example."""
    named = {part for pair in NAMED.findall(value.__doc__ or "") for name in pair for part in name.split(".")}
    return bool(named & {value.__name__ for value in WITH_EXAMPLES})


def test_every_public_name_has_a_docstring():
    assert not [
        value for value in PUBLIC if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}(")
    ]


def test_every_public_function_has_an_example_and_every_class_or_what_makes_it():
    assert len(PUBLIC) > 200
    without = PUBLIC - WITH_EXAMPLES
    functions = {value for value in without if inspect.isroutine(value)}
    classes = {
        value for value in without - functions if not is_plain(value) and not is_shown_elsewhere(value)
    }
    assert not sorted(value.__name__ for value in functions | classes)
