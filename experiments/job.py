"""What surrounds a job of any program: the random states and flags of torch, and the trace of a failure."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from hydra.errors import CompactHydraException
from omegaconf.errors import OmegaConfBaseException

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator
    from pathlib import Path

FAILURE = "failure.txt"
DEFAULT_THREADS = torch.get_num_threads()
EXPECTED = (ValueError, ArithmeticError, OSError, OmegaConfBaseException)


class RunError(CompactHydraException):
    """An error whose message is all the user needs; Hydra prints it without a traceback."""


def seed_everything(seed: int, threads: int | None, *, anomaly: bool = False) -> None:
    """Set the global random states and flags of torch; jobs of a sweep share a process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(threads or DEFAULT_THREADS)
    torch.autograd.set_detect_anomaly(anomaly)


@contextlib.contextmanager
def failures_reported(folder: Path, log: logging.Logger) -> Iterator[None]:
    """Put what goes wrong in a job into its log and its folder, as well as on the terminal.

    Raises:
        RunError: In place of an error that the user's input or the machine explains.
    """
    (folder / FAILURE).unlink(missing_ok=True)
    try:
        yield
    except EXPECTED as error:
        log.error("%s", error)
        (folder / FAILURE).write_text(f"{error}\n")
        raise RunError(str(error)) from error
    except Exception as error:
        log.exception("The run failed.")
        (folder / FAILURE).write_text(f"{type(error).__name__}: {error}\n")
        raise
