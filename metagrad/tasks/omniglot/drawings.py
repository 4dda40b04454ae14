"""Reading the drawings of characters out of archives, folders and the packed array file."""

from __future__ import annotations

import io
import re
import zipfile
from typing import TYPE_CHECKING

import numpy as np

from metagrad.tasks._data_root import pillow
from metagrad.tasks.omniglot.splits import DRAWING_SIZE, NUM_DRAWERS, Character

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

Drawings = tuple[Character, np.ndarray]

_PNG_NAME = re.compile(r"(?:^|/)(?P<alphabet>[^/]+)/character(?P<number>\d+)/[^/]*_(?P<drawer>\d+)\.png$")


def read_drawings(path: Path, wanted: Collection[Character]) -> Iterator[Drawings]:
    """Read those of the wanted characters that a file or folder has.

    Args:
        path: An official zip, an extracted folder, or the packed array file.
        wanted: The characters to read.

    Yields:
        A character and its drawings in the order of the drawers, [20, 105, 105] uint8 with ink = 1.

    Raises:
        ValueError: When a character lacks drawings, or a drawing is not 105x105 in black and white.
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
    except (OSError, SyntaxError) as error:  # Pillow's, of a file that is damaged or no image
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
