"""Programs of other libraries start as in processes of their own."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _new_state_of_accelerate():
    """Forget the precision that an earlier test chose for the process."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
