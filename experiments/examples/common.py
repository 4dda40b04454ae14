"""What the examples share: the paths of data, and the comparison with a dense result."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from experiments.run.files import data_file


def find_file(name: str) -> Path:
    """Return the path of a file below `$METAGRAD_DATA`, or below `~/.cache/metagrad` if the variable is not set.

    Raises:
        SystemExit: The file is not there.
    """
    try:
        return data_file(name)
    except FileNotFoundError as error:
        raise SystemExit(str(error)) from None


def compare(name: str, got: Tensor, expected: Tensor, *, tolerance: float) -> None:
    """Print the difference of two tensors, relative to the largest expected value.

    Raises:
        SystemExit: The difference is above the tolerance.
    """
    difference = (got - expected).detach().abs().max()
    error = float(difference / expected.detach().abs().max()) if difference != 0 else 0.0
    print(f"  {name}: relative difference {error:.1e}")
    if not error <= tolerance:
        raise SystemExit(f"{name}: the relative difference must be at most {tolerance:.0e}, got {error:.1e}.")
