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


def covering(*axes, fast):
    """Combine values so that every pair of values of two axes occurs; those that are not fast wait for `test-all`."""
    modulus = max(map(len, axes))
    cases = []
    for indices in itertools.product(*map(range, map(len, axes))):
        values = [list(axis)[i] for axis, i in zip(axes, indices, strict=True)]
        if fast(*values):
            cases.append(tuple(values))
        elif sum(indices) % modulus == 0:
            cases.append(slow(*values))
    return cases
