"""The data folder and the reader of images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """Return the data folder: the argument, else `$METAGRAD_DATA`, else `~/.cache/metagrad`."""
    return Path(root or os.environ.get("METAGRAD_DATA") or "~/.cache/metagrad").expanduser()


def find_path(call: str, path: str | os.PathLike[str]) -> Path:
    """Return a file or folder. A relative path may start at the current folder or at the data folder.

    Raises:
        ValueError: The path does not exist in either place.
    """
    given, below = Path(path).expanduser(), data_root(None) / path
    if given.exists():
        return given
    if below.exists():
        return below
    also = f", and there is no {below}: METAGRAD_DATA says where the data folder is"
    raise ValueError(f"{call}: there is no {given}{'' if given.is_absolute() else also}.")


def pillow(call: str) -> Any:
    """Return Pillow's module `Image`.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"{call}: reading images needs Pillow; install it by `pip install pillow`."
        ) from error
    return Image
