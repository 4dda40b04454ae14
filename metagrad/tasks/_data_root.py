"""Where data are looked for, and what reads images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """Return the folder to look in: the argument, else `$METAGRAD_DATA`, else `~/.cache/metagrad`."""
    return Path(root or os.environ.get("METAGRAD_DATA") or "~/.cache/metagrad").expanduser()


def find_path(call: str, path: str | os.PathLike[str]) -> Path:
    """Return a file or folder, which may be given relative to the data folder.

    Raises:
        ValueError: It is in neither place.
    """
    given, below = Path(path).expanduser(), data_root(None) / path
    if given.exists():
        return given
    if below.exists():
        return below
    also = f", and there is no {below}: METAGRAD_DATA says where the data folder is"
    raise ValueError(f"{call}: there is no {given}{'' if given.is_absolute() else also}.")


def pillow(call: str) -> Any:
    """Return Pillow's module of images.

    Raises:
        ImportError: It is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"{call}: reading images needs Pillow; install it by `pip install pillow`."
        ) from error
    return Image
