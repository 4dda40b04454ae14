"""Atomic writes, so that a crash leaves the previous file, and the paths of data."""

from __future__ import annotations

import os
from pathlib import Path


def data_file(name: str) -> Path:
    """Return the path of a file below `$METAGRAD_DATA`, or below `~/.cache/metagrad` if the variable is not set.

    Raises:
        FileNotFoundError: The file is not there.
    """
    path = Path(os.environ.get("METAGRAD_DATA") or "~/.cache/metagrad").expanduser() / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. Put it there, or set METAGRAD_DATA to the folder that has {name}."
        )
    return path


def command_of(module: str) -> str:
    """Return the command of a program: `metagrad NAME` if installed by a wheel, `python -m MODULE` in a checkout."""
    is_installed = Path(__file__).parents[2].name == "metagrad_experiments"
    return f"metagrad {module.removeprefix('experiments.')}" if is_installed else f"python -m {module}"


def markdown(rows: list[list[str]]) -> str:
    """Return rows of cells as a Markdown table. The first row is the header."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]])


def write_text(path: Path, text: str) -> None:
    """Write a file of text."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk.

    Raises:
        OSError: The file cannot be written. The message names it.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
