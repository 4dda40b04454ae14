"""Marks for parametrized cases."""

import itertools

import pytest


def slow(*values, **options):
    """Return a case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def fast(kept, values):
    """Return the values, where only `make test-all` runs the values outside of ``kept``."""
    return [value if value in kept else slow(value) for value in values]


def combined(*axes, fast):
    """Return the product of all axes, where only `make test-all` runs combinations that are not ``fast``."""
    return [values if fast(*values) else slow(*values) for values in itertools.product(*axes)]


def covering(*axes, fast):
    """Return combinations that cover every pair of values of two axes, and all combinations that are ``fast``."""
    modulus = max(map(len, axes))
    cases = []
    for indices in itertools.product(*map(range, map(len, axes))):
        values = [list(axis)[i] for axis, i in zip(axes, indices, strict=True)]
        if fast(*values):
            cases.append(tuple(values))
        elif sum(indices) % modulus == 0:
            cases.append(slow(*values))
    return cases
