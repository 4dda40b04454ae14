"""What surrounds a job of any program: random states and flags, its folder, signals, and how errors are reported."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import (
    CompactHydraException,
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from experiments.run import checkpoint, result
from experiments.run.files import write_text
from experiments.run.signals import Interrupted, signals_raised
from metagrad.curvature import SolveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_THREADS = torch.get_num_threads()
EXPECTED = (
    ValueError,
    ArithmeticError,
    OSError,
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    torch.OutOfMemoryError,
    torch.linalg.LinAlgError,  # type: ignore[reportPrivateImportUsage]
    SolveError,
)
"""Errors that the user's input or the machine explains. Every other error is a bug, and keeps its traceback."""

failed: dict[str, list[str]] = {}
"""The failed jobs of a sweep in this process, by the reason."""


class RunError(CompactHydraException):
    """An error whose message is sufficient for the user, so no traceback is printed."""


def launch(program: Callable[[], object], config: str | None = None, module: str = "") -> None:
    """Run a program. An error that the user can understand is printed as one sentence, with exit status 1.

    `HYDRA_FULL_ERROR=1` shows tracebacks.

    Args:
        program: The program.
        config: The name of its config, whose groups and keys `--help` prints. None if the program has its own help.
        module: The module that starts it.
    """
    if config is not None and {"-h", "--help"} & set(sys.argv[1:]):
        program = partial(_print_help, config, module)
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        program()
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them
    logging.raiseExceptions = False  # if the disk is full, the next write of the run itself raises
    try:
        program()
    except KeyboardInterrupt as stop:
        _end(str(explained(stop)), getattr(stop, "status", 130))
    except Exception as error:
        sentence, listed = explained(error), _failed_in_sweep()
        if sentence is None:
            sys.stderr.write(listed)
            raise
        _end(listed or sentence, 1)
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def _print_help(config: str, module: str) -> None:
    from experiments.run import help  # composes the configuration, which a run does not do twice

    print(help.text(config, module, sys.argv[1:]))


def explained(error: BaseException) -> str | None:
    """Return the message that the user sees for an error. None for a bug."""
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "Interrupted."
    if isinstance(error, (FileExistsError, NotADirectoryError)) and error.filename:
        return f"{error.filename} is a file or lies below a file; choose another hydra.run.dir or folder."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return (
            f"Out of memory: {str(error).splitlines()[0]} Make meta_batch or evaluate.chunk smaller, or set "
            "algorithm.memory=step or algorithm.task_chunk=1."
        )
    if not isinstance(error, EXPECTED):
        return None
    if plugin := re.search(r"Could not find 'hydra/(launcher|sweeper)/(\w+)'", str(error)):
        return "hydra/{}={} is a plugin that is not installed: run pip install -e '.[sweep]'.".format(
            *plugin.groups()
        )
    return _of_override(error) or "\n".join(_lines(error)) or type(error).__name__


def seed_everything(seed: int, threads: int | None, *, anomaly: bool = False) -> None:
    """Set the global random states and flags of torch, since the jobs of a sweep share a process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(threads or DEFAULT_THREADS)
    torch.autograd.set_detect_anomaly(anomaly)


@contextlib.contextmanager
def failures_reported(folder: Path, log: logging.Logger) -> Iterator[None]:
    """Write the error of a job into its log, with the traceback, and into its folder.

    If the folder holds another, earlier run, nothing is written into it.

    Raises:
        RunError: Raised instead of an error that the user's input or the machine explains.
    """
    is_new = not holds_run(folder)
    try:
        yield
    except Exception as error:
        sentence = explained(error)
        message = sentence or f"The run failed: {type(error).__name__}: {error}"
        _log(log, message, error)
        if is_new:
            _note(folder, error)
        if _is_sweep():
            job = HydraConfig.get().job
            failed.setdefault(message, []).append(f"{job.num} ({job.override_dirname})")
        if sentence is None:
            raise
        raise RunError(sentence) from error


@contextlib.contextmanager
def claimed(folder: Path, *, is_resumed: bool = False, how_to_go_on: str = "") -> Iterator[None]:
    """Lock a folder for this run. If the run ends early, `failure.txt` says why.

    Args:
        folder: The folder that the run writes to.
        is_resumed: True if the run resumes the run in the folder.
        how_to_go_on: Message that is printed if a signal ends the run and there is a checkpoint.

    Raises:
        ValueError: Another process writes to the folder, or the folder already holds a run.
        Interrupted: A signal has ended the run.
    """
    with _locked(folder), signals_raised():
        if holds_run(folder) and not is_resumed:
            raise ValueError(
                f"{folder} holds a run already: continue it by resume=FOLDER, or choose another hydra.run.dir or "
                "hydra.sweep.dir."
            )
        (folder / result.FAILURE).unlink(missing_ok=True)
        try:
            yield
        except Interrupted as stop:
            can_go_on = how_to_go_on and (folder / checkpoint.FILE).is_file()
            ended = stop.ending(how_to_go_on if can_go_on else "")
            _note(folder, ended)
            raise ended from None
        except Exception as error:
            _note(folder, error)
            raise


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds the results of a run, which another run would overwrite."""
    return (folder / result.FILE).exists() or any((folder / "checkpoints").glob("*.pt"))


def _record(*, _root_: Any) -> str:
    """Return where Hydra writes what is configured: a folder that is taken keeps the record of the run it holds."""
    folder = OmegaConf.select(_root_, "hydra.runtime.output_dir", default=None)
    return ".hydra_resumed" if folder and Path(folder).is_dir() and _is_taken(Path(folder)) else ".hydra"


OmegaConf.register_new_resolver("record", _record, replace=True)  # also in the processes of a launcher


def _is_taken(folder: Path) -> bool:
    """Return whether a folder holds a run, or another process is writing to it."""
    if holds_run(folder):
        return True
    try:
        with _locked(folder):
            return False
    except ValueError:
        return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, if its file system has locks. The system releases it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"{folder}: another process is writing to this folder; wait for it, or choose another "
                    "hydra.run.dir or hydra.sweep.dir."
                ) from error
        yield
    finally:
        os.close(descriptor)


def _note(folder: Path, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # of a full disk: the terminal and the exit status still tell
        write_text(folder / result.FAILURE, f"{explained(error) or f'{type(error).__name__}: {error}'}\n")


def _log(log: logging.Logger, message: str, error: BaseException) -> None:
    """Write an error and its traceback to the log file. In a sweep, also print the error to the terminal."""
    trace = (type(error), error, error.__traceback__)
    for handler in logging.getLogger().handlers:
        is_file = isinstance(handler, logging.FileHandler)
        if is_file or _is_sweep():
            handler.handle(
                log.makeRecord(log.name, logging.ERROR, __file__, 0, message, (), trace if is_file else None)
            )


def _is_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN


def _failed_in_sweep() -> str:
    number = sum(map(len, failed.values()))
    listed = [f"  {', '.join(jobs)}: {message}" for message, jobs in failed.items()]
    return "\n".join([f"{number} job{'s' if number > 1 else ''} failed:", *listed]) if failed else ""


def _of_override(error: BaseException) -> str | None:
    """Return the message for an incorrect setting. None for any other error."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return f"There is no {group}={name}; the options are {', '.join(error.options)}."
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not a KEY=VALUE that Hydra can read; quote values with special characters."
    cause = error.__cause__
    if not isinstance(error, ConfigCompositionException) or not isinstance(cause, OmegaConfBaseException):
        return None
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and isinstance(
        cause.parent_node, DictConfig
    ):
        keys = ", ".join(str(key) for key in cause.parent_node if key not in ("_target_", "hydra"))
        return f"There is no key {cause.full_key}; the keys there are {keys}."
    return f"{cause.full_key}: {_lines(cause)[0]}"


def _lines(error: BaseException) -> list[str]:
    """Return the message of an error, without OmegaConf's class names and the tracebacks of worker processes."""
    lines = [line.rstrip() for line in str(error).splitlines()]
    if "Original Traceback (most recent call last):" in lines:
        lines = lines[-1:]
    return [
        line for line in lines if line and not line.lstrip().startswith(("reference_type=", "object_type="))
    ]


def _end(message: str, status: int) -> None:
    sys.stderr.write(f"{message}\n")
    sys.exit(status)
