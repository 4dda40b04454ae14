"""Marks of single cases."""

from __future__ import annotations

import pytest


def slow(*values, **options):
    """Leave a case to `make test-all`: one that others stand for in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
