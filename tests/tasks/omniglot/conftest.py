"""A tiny Omniglot in all the layouts that the loader reads, and the real files where they are at hand."""

import hashlib
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from metagrad.tasks.omniglot import files
from metagrad.tasks.omniglot.splits import SPLITS, Character, Split

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

ALPHABETS = {"images_background": ("Aa", "Bb"), "images_evaluation": ("Cc",)}
CHARACTERS = (Character("Aa", 1), Character("Aa", 2), Character("Bb", 1), Character("Cc", 1))


def make_png(pixels: np.ndarray) -> bytes:
    """Encode black-and-white values [height, width]."""
    stream = io.BytesIO()
    Image.fromarray(pixels.astype(bool)).save(stream, format="png")
    return stream.getvalue()


@dataclass
class TinyOmniglot:
    """Four characters of random ink, three in the background and one for evaluation."""

    ink: np.ndarray
    monkeypatch: pytest.MonkeyPatch

    def pngs(self, archive: str) -> dict[str, bytes]:
        half = "images_evaluation" if archive == "images_evaluation" else "images_background"
        return {
            f"{archive}/{c.alphabet}/character{c.number:02d}/{k:04d}_{drawer + 1:02d}.png": make_png(
                1 - self.ink[k, drawer]
            )
            for k, c in enumerate(CHARACTERS)
            if c.alphabet in ALPHABETS[half]
            for drawer in range(20)
        }

    def write_zip(self, folder: Path, archive: str, *, without: str = "nothing") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{archive}.zip"
        with zipfile.ZipFile(path, "w") as file:
            for name, data in self.pngs(archive).items():
                if without not in name:
                    file.writestr(name, data)
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        self.monkeypatch.setitem(files.ARCHIVES_MD5, archive, digest)
        return path

    def write_tree(self, folder: Path, archive: str, *, without: str = "nothing") -> Path:
        with zipfile.ZipFile(self.write_zip(folder / "zip", archive, without=without)) as file:
            file.extractall(folder)
        return folder / archive

    def write_bits(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / files.BITS_NAME
        np.savez(
            path,
            images_packed=np.packbits(self.ink.reshape(len(CHARACTERS) * 20, -1), axis=1),
            alphabet_names=np.array(["Aa", "Bb", "Cc"]),
            char_alphabet=np.array([0, 0, 1, 2], dtype=np.int8),
            char_number=np.array([1, 2, 1, 1], dtype=np.int8),
        )
        self.monkeypatch.setattr(files, "BITS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
        return path


@pytest.fixture
def tiny(monkeypatch) -> TinyOmniglot:
    """Replace splits and digests for a data set of four characters."""
    monkeypatch.delenv("METAGRAD_DATA", raising=False)
    one, other = ("images_background",), ("images_evaluation",)
    small = ("images_background_small1",)
    for name, split in {
        "train": Split("nobody", CHARACTERS, (one + other,)),
        "test": Split("nobody", CHARACTERS[3:], (other,)),
        "background": Split("nobody", CHARACTERS[:3], (one,)),
        "small1": Split("nobody", CHARACTERS[:3], (small, one)),
    }.items():
        monkeypatch.setitem(SPLITS, name, split)
    ink = np.random.default_rng(0).integers(0, 2, (len(CHARACTERS), 20, 105, 105), dtype=np.uint8)
    return TinyOmniglot(ink, monkeypatch)


def real_file(name: str) -> Path:
    """Return a file of the data folder, or skip the test that needs it."""
    root = os.environ.get("METAGRAD_DATA")
    path = Path(root or "METAGRAD_DATA is not set") / "omniglot" / name
    if not path.is_file():
        pytest.skip(f"needs {path}, which is not there")
    return path


@pytest.fixture
def real_bits() -> Path:
    return real_file("omniglot_105_bits.npz")


@pytest.fixture
def real_small() -> Path:
    return real_file("images_background_small1.zip")


@pytest.fixture
def png():
    """Return the encoder. Test folders are not packages, so tests cannot import it."""
    return make_png
