from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["batch", "sinusoid", "omniglot.dataset"])
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(f"metagrad.tasks.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
