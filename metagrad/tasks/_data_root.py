"""Where data are looked for."""

from __future__ import annotations

import os
from pathlib import Path


def data_root(root: str | os.PathLike[str] | None) -> Path:
    """Return the folder to look in: the argument, else `$METAGRAD_DATA`, else `~/.cache/metagrad`."""
    return Path(root or os.environ.get("METAGRAD_DATA") or "~/.cache/metagrad").expanduser()


def find_path(call: str, path: str | os.PathLike[str]) -> Path:
    """Return a file or folder, which may be given relative to the data folder.

    Raises:
        ValueError: It is in neither place.
    """
    places = [Path(path).expanduser(), data_root(None) / path]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise ValueError(
            f"{call}: {path} is not there; looked for {' and '.join(map(str, places))}. METAGRAD_DATA says where the "
            "data folder is."
        )
    return found
