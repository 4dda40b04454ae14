"""Resuming a run: `resume=FOLDER` continues in that folder, `resume=FILE` starts a new run from a checkpoint.

A folder brings its own overrides, so `python -m experiments.train resume=FOLDER` is the whole command. Overrides on
the command line take precedence. A file holds only the state, so repeat the overrides of its run. If the file is
inside a run folder, the new run copies the metrics up to the checkpoint, and the folder stays the same.
`resume=auto` is for commands that are repeated unchanged, by a cluster that requeues a job or by a sweep. It
resumes from the checkpoint of the run's own folder, if there is one.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.run import checkpoint
from experiments.run.files import command_of

HISTORIES = ("metrics.jsonl", "costs.jsonl")
AUTO = "auto"


def settled(path: str | None, folder: Path) -> str | None:
    """Return the path that a run resumes. ``"auto"`` is the run's own folder if it has a checkpoint, else None."""
    if path != AUTO:
        return path
    return str(folder) if (folder / checkpoint.FILE).is_file() else None


def command_line(arguments: list[str]) -> list[str]:
    """Return the command line. If it resumes a run folder, the overrides of that folder are added.

    Raises:
        ValueError: The folder is not a run folder, or the command line has `-m` or another folder.
    """
    folder = _folder(arguments)
    if folder is None:
        return arguments
    if any(argument.lstrip("+").startswith("hydra.run.dir=") for argument in arguments):
        raise ValueError(
            f"resume: {folder} is continued in place, so hydra.run.dir cannot be another folder. Leave it out; or "
            f"give resume={folder / checkpoint.FILE}, with the overrides of that run, to start a new run "
            "from its state."
        )
    if {"-m", "--multirun"} & set(arguments):
        raise ValueError(
            "resume: a run folder is continued by one run; leave out -m, or resume=FILE for every job."
        )
    overrides = folder / ".hydra" / "overrides.yaml"
    if not overrides.is_file():
        raise ValueError(f"resume: {folder} is not a run folder: it has no .hydra/overrides.yaml.")
    saved = yaml.safe_load(overrides.read_text()) or []
    first = next(i for i, argument in enumerate(arguments) if _is_override(argument))
    return [*arguments[:first], *saved, *arguments[first:], f"hydra.run.dir={quoted(folder)}"]


def checkpoint_file(path: str) -> Path:
    """Return the checkpoint file of `resume=PATH`."""
    return Path(path) / checkpoint.FILE if Path(path).is_dir() else Path(path)


def is_in_place(path: str | None, folder: Path) -> bool:
    """Return whether a run that resumes from a path writes into the folder of the checkpoint."""
    return path is not None and checkpoint_file(path).resolve() == (folder / checkpoint.FILE).resolve()


def how_to(folder: Path) -> str:
    """Return the command that resumes an interrupted run."""
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return f"Resume with: {command_of('experiments.train')} {shlex.quote(f'resume={quoted(shown)}')}"


def copy_history(file: Path, folder: Path) -> None:
    """Copy the metrics of the run that the checkpoint comes from into a new run."""
    source = file.parent.parent
    for name in HISTORIES:
        if source.resolve() != folder.resolve() and (source / name).is_file():
            shutil.copy(source / name, folder / name)


def _folder(arguments: list[str]) -> Path | None:
    given = [argument for argument in arguments if argument.lstrip("+").startswith("resume=")]
    if not given:
        return None
    plain = given[-1].partition("=")[2]
    path = plain if Path(plain).is_dir() else OverridesParser.create().parse_override(given[-1]).value()
    return Path(path) if isinstance(path, str) and Path(path).is_dir() else None


def _is_override(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


def quoted(path: Path) -> str:
    """Return a path as Hydra reads it on the command line, in quotes where Hydra needs them."""
    if re.fullmatch(r"[A-Za-z0-9_/.-]+", str(path)):
        return str(path)
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), str(path))
    return f"'{escaped}'"
