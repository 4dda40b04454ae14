"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch

import metagrad

MODULES = [info.name for info in pkgutil.walk_packages(metagrad.__path__, "metagrad.")]
WITHOUT_EXAMPLES = doctest.DocTestFinder(exclude_empty=True)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch, "metagrad": metagrad})
    assert results.failed == 0


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
