from __future__ import annotations

import numpy as np
import pytest

from metagrad.tasks.omniglot.drawings import read_drawings
from metagrad.tasks.omniglot.splits import SPLITS

LAYOUTS = ["write_zip", "write_tree", "write_bits"]


def write(tiny, layout: str, folder):
    return getattr(tiny, layout)(folder, *(() if layout == "write_bits" else ("images_background",)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_ink(tiny, tmp_path, layout):
    read = dict(read_drawings(write(tiny, layout, tmp_path), SPLITS["background"].characters))
    assert read.keys() == set(SPLITS["background"].characters)
    for k, character in enumerate(SPLITS["background"].characters):
        assert read[character].dtype == np.uint8
        assert np.array_equal(read[character], tiny.ink[k])


@pytest.mark.parametrize("layout", ["write_zip", "write_tree"])
def test_a_missing_drawing_is_an_error(tiny, tmp_path, layout):
    path = getattr(tiny, layout)(tmp_path, "images_background", without="character02/0001_07")
    with pytest.raises(ValueError, match=r"must have drawings 1 to 20 of Aa/character02, got \[1, .* 6, 8, "):
        list(read_drawings(path, SPLITS["background"].characters))


def test_a_drawing_of_another_size_is_an_error(tiny, tmp_path, png):
    path = tiny.write_tree(tmp_path, "images_background")
    (path / "Bb/character01/0002_03.png").write_bytes(png(np.zeros((105, 104), dtype=int)))
    with pytest.raises(ValueError, match=r"Bb/character01/0002_03\.png in .*must be 105x105, got 105x104"):
        list(read_drawings(path, SPLITS["background"].characters))


def test_a_damaged_drawing_is_named(tiny, tmp_path):
    path = tiny.write_tree(tmp_path, "images_background")
    (path / "Bb/character01/0002_03.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"0002_03\.png in .* could not be decoded: "):
        list(read_drawings(path, SPLITS["background"].characters))


def test_official_archives_and_the_array_file_hold_the_same_ink(real_small, real_bits):
    name, path = real_small
    characters = SPLITS[name].characters
    from_zip, from_bits = dict(read_drawings(path, characters)), dict(read_drawings(real_bits, characters))
    assert from_zip.keys() == from_bits.keys() == set(characters)
    assert all(np.array_equal(from_zip[c], from_bits[c]) for c in characters)
