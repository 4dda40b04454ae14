"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
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


@pytest.mark.parametrize(
    "public",
    [
        *(getattr(metagrad, n) for n in metagrad.__all__ if callable(getattr(metagrad, n))),
        *(getattr(metagrad.tasks, n) for n in ("Omniglot", "Sinusoid", "Batch")),
        *(getattr(metagrad.models, n) for n in metagrad.models.__all__),
        metagrad.optim.rules.sgd,
    ],
    ids=lambda public: public.__name__,
)
def test_every_public_name_has_an_example(public):
    assert ">>>" in (public.__doc__ or ""), f"{public.__name__} has no example"
