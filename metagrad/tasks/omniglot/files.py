"""Find, verify, download and read the files of Omniglot."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metagrad.tasks._data_root import data_root, pillow
from metagrad.tasks.omniglot.splits import DRAWING_SIZE, NUM_DRAWERS, Character

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from metagrad.tasks.omniglot.splits import Split


ARCHIVES_URL = "https://github.com/brendenlake/omniglot/raw/master/python"
ARCHIVES_MD5 = {
    "images_background": "68d2efa1b9178cc56df9314c21c6e718",
    "images_evaluation": "6b91aef0f799c5bb55b94e3f2daec811",
    "images_background_small1": "e704a628b5459e08445c13499850abc4",
}
BITS_NAME = "omniglot_105_bits.npz"
BITS_SHA256 = "97518a2c8b2d2b7b9207bcdaa6d1328ed0f463a77f835094b5e9e45e29e701f9"
TIMEOUT = 60.0  # seconds without an answer until a download fails


def find_files(root: str | os.PathLike[str] | None, split: Split, *, download: bool) -> list[Path]:
    """Return the verified files or folders that together contain all characters of a split.

    Args:
        root: The data folder, or its subfolder `omniglot`. None means `$METAGRAD_DATA`, else `~/.cache/metagrad`.
        split: The split.
        download: True to download the official archives if nothing is found.

    Returns:
        Paths of zips, else of extracted folders, else of the array file.

    Raises:
        ValueError: Nothing is found, or the digest of a file is wrong.
        OSError: A download fails.
    """
    home = data_root(root)
    folders = (home / "omniglot", home)
    paths = _find_archives(folders, split) or _find_bits(folders)
    if paths is None and download:
        folder = home if home.name == "omniglot" else home / "omniglot"
        paths = [_find_archive(folders, name) or fetch_archive(name, folder) for name in split.archives[0]]
    if paths is None:
        raise ValueError(_nothing_found(folders, split))
    for path in paths:
        verify(path)
    return paths


def verify(path: Path, *, origin: str | None = None) -> None:
    """Raise ``ValueError`` unless a file has its published digest. Folders have no digest.

    Args:
        path: A zip, a folder or the array file.
        origin: Name of the file in error messages. None means its path.
    """
    if path.suffix == ".zip":
        _compare("md5", path, ARCHIVES_MD5[path.stem], origin or str(path))
    elif path.suffix == ".npz":
        _compare("sha256", path, BITS_SHA256, origin or str(path))


def fetch_archive(name: str, folder: Path) -> Path:
    """Download and verify an official archive. If this fails, no file is left in the folder."""
    url, target = f"{ARCHIVES_URL}/{name}.zip", folder / f"{name}.zip"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        part = Path(scratch) / target.name
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, part.open("wb") as file:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            raise OSError(
                f"Omniglot(download=True): {url} could not be fetched ({error}). "
                f"Try again, or put the file into {folder}."
            ) from error
        verify(part, origin=url)
        os.replace(part, target)
    return target


def _find_archives(folders: tuple[Path, ...], split: Split) -> list[Path] | None:
    for names in split.archives:
        found = [_find_archive(folders, name) for name in names]
        paths = [path for path in found if path is not None]
        if len(paths) == len(names):
            return paths
    return None


def _find_archive(folders: tuple[Path, ...], name: str) -> Path | None:
    zips = [folder / f"{name}.zip" for folder in folders]
    trees = [folder / name for folder in folders]
    return next((p for p in zips if p.is_file()), None) or next((p for p in trees if p.is_dir()), None)


def _find_bits(folders: tuple[Path, ...]) -> list[Path] | None:
    return next(([folder / BITS_NAME] for folder in folders if (folder / BITS_NAME).is_file()), None)


def _nothing_found(folders: tuple[Path, ...], split: Split) -> str:
    lacking = [name for name in split.archives[0] if _find_archive(folders, name) is None]
    names = " and ".join(f"{name}.zip" for name in lacking)
    looked = [f"{folder / name}{end}" for name in lacking for end in (".zip", os.sep) for folder in folders]
    looked += [str(folder / BITS_NAME) for folder in folders]
    return (
        f"Omniglot: this split needs {names}. None of these exists:\n  "
        + "\n  ".join(looked)
        + "\nPass download=True to fetch Omniglot from the dataset's own repository, or say where it is "
        + "by root= or METAGRAD_DATA."
    )


def _compare(algorithm: str, path: Path, expected: str, origin: str) -> None:
    digest = hashlib.new(algorithm, path.read_bytes(), usedforsecurity=False).hexdigest()
    if digest != expected:
        raise ValueError(
            f"Omniglot: {origin} is corrupt: its {algorithm} must be {expected}, got {digest}. "
            "Delete what is there and fetch it again."
        )


Drawings = tuple[Character, np.ndarray]

_PNG_NAME = re.compile(
    r"(?:^|/)(?P<alphabet>[^/]+)/character(?P<number>\d+)/[^/.][^/]*_(?P<drawer>\d+)\.png$"
)


def read_drawings(path: Path, wanted: Collection[Character]) -> Iterator[Drawings]:
    """Read the wanted characters that a file or folder contains.

    Args:
        path: An official zip, an extracted folder, or the packed array file.
        wanted: The characters to read.

    Yields:
        A character and its images in the order of the writers, [20, 105, 105] uint8 with ink = 1.

    Raises:
        ValueError: An image of a character is missing, or is not 105x105 in black and white.
    """
    if path.suffix == ".npz":
        yield from _read_bits(path, wanted)
    elif path.is_dir():
        names = [p.relative_to(path).as_posix() for p in path.rglob("*.png")]
        yield from _read_pngs(path, names, lambda name: (path / name).read_bytes(), wanted)
    else:
        with zipfile.ZipFile(path) as archive:
            yield from _read_pngs(path, archive.namelist(), archive.read, wanted)


def _read_pngs(
    path: Path, names: Iterable[str], read: Callable[[str], bytes], wanted: Collection[Character]
) -> Iterator[Drawings]:
    for character, by_drawer in _group_by_character(names, wanted).items():
        if sorted(by_drawer) != list(range(1, NUM_DRAWERS + 1)):
            raise ValueError(
                f"Omniglot: {path} must have drawings 1 to {NUM_DRAWERS} of {character.alphabet}/"
                f"character{character.number:02d}, got {sorted(by_drawer)}. "
                "Extract the official archive again."
            )
        files = [by_drawer[drawer] for drawer in sorted(by_drawer)]
        yield character, np.stack([_decode_drawing(path, name, read(name)) for name in files])


def _group_by_character(
    names: Iterable[str], wanted: Collection[Character]
) -> dict[Character, dict[int, str]]:
    groups: dict[Character, dict[int, str]] = {}
    for name in names:
        if match := _PNG_NAME.search(name):
            character = Character(match["alphabet"], int(match["number"]))
            if character in wanted:
                groups.setdefault(character, {})[int(match["drawer"])] = name
    return groups


def _decode_drawing(path: Path, name: str, data: bytes) -> np.ndarray:
    try:
        with pillow("Omniglot").open(io.BytesIO(data)) as image:
            pixels = np.asarray(image.convert("1"), dtype=np.uint8)
    except (OSError, SyntaxError) as error:  # for a file that is damaged or not an image
        raise ValueError(f"Omniglot: {name} in {path} could not be decoded: {error}") from error
    if pixels.shape != (DRAWING_SIZE, DRAWING_SIZE):
        raise ValueError(
            f"Omniglot: {name} in {path} must be {DRAWING_SIZE}x{DRAWING_SIZE}, got "
            f"{pixels.shape[0]}x{pixels.shape[1]}."
        )
    return 1 - pixels


def _read_bits(path: Path, wanted: Collection[Character]) -> Iterator[Drawings]:
    with np.load(path, allow_pickle=False) as arrays:
        alphabets = arrays["alphabet_names"][arrays["char_alphabet"]].tolist()
        numbers, packed = arrays["char_number"].tolist(), arrays["images_packed"]
    packed = packed.reshape(len(numbers), NUM_DRAWERS, -1)
    for character, bits in zip(map(Character, alphabets, numbers), packed, strict=True):
        if character in wanted:
            pixels = np.unpackbits(bits, axis=1)[:, : DRAWING_SIZE**2]
            yield character, pixels.reshape(NUM_DRAWERS, DRAWING_SIZE, DRAWING_SIZE)
