"""Marks of single cases."""

from __future__ import annotations

import itertools

import pytest


def slow(*values, **options):
    """Leave a case to `make test-all`: one that others stand for in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def fast(kept, values):
    """Leave the values that are not kept to `make test-all`."""
    return [value if value in kept else slow(value) for value in values]


def combined(*axes, fast):
    """Combine the values of all axes; those of which ``fast`` is not true are left to `make test-all`."""
    return [values if fast(*values) else slow(*values) for values in itertools.product(*axes)]
