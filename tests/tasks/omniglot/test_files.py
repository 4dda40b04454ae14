from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from metagrad.tasks.omniglot import files
from metagrad.tasks.omniglot.files import data_root, fetch_archive, find_files, read_drawings
from metagrad.tasks.omniglot.splits import SPLITS, Character

if TYPE_CHECKING:
    from pathlib import Path


BACKGROUND, EVALUATION = "images_background", "images_evaluation"


def find(root: Path | None, split: str, *, download: bool = False) -> list[Path]:
    return find_files(root, SPLITS[split], download=download)


def test_the_root_comes_from_the_argument_then_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("METAGRAD_DATA", raising=False)
    assert data_root(None) == tmp_path / "home" / ".cache" / "metagrad"
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path / "variable"))
    assert data_root(None) == tmp_path / "variable"
    assert data_root(tmp_path / "argument") == tmp_path / "argument"


def test_zips_come_before_folders_before_the_array_file(tiny, tmp_path):
    bits = tiny.write_bits(tmp_path / "omniglot")
    assert find(tmp_path, "background") == [bits]
    tree = tiny.write_tree(tmp_path, BACKGROUND)
    assert find(tmp_path, "background") == [tree]
    archive = tiny.write_zip(tmp_path, BACKGROUND)
    assert find(tmp_path, "background") == [archive]


def test_a_subset_takes_its_own_zip_or_the_whole_background(tiny, tmp_path):
    whole = tiny.write_zip(tmp_path, BACKGROUND)
    assert find(tmp_path, "small1") == [whole]
    small = tiny.write_zip(tmp_path, "images_background_small1")
    assert find(tmp_path, "small1") == [small]


def test_nothing_found_lists_every_place_and_what_to_do(tiny, tmp_path):
    expected = r"this split needs images_background\.zip and images_evaluation\.zip"
    with pytest.raises(ValueError, match=expected) as info:
        find(tmp_path, "train")
    message = str(info.value)
    for folder in (tmp_path / "omniglot", tmp_path):
        for name in (f"{BACKGROUND}.zip", f"{BACKGROUND}/", f"{EVALUATION}.zip", files.BITS_NAME):
            assert f"{folder}/{name}\n" in message
    assert "download=True" in message
    assert "METAGRAD_DATA" in message


@pytest.mark.parametrize("kind", ["zip", "bits"])
def test_a_corrupt_file_is_named_with_both_digests(tiny, tmp_path, kind):
    path = tiny.write_zip(tmp_path, BACKGROUND) if kind == "zip" else tiny.write_bits(tmp_path)
    expected = files.ARCHIVES_MD5[BACKGROUND] if kind == "zip" else files.BITS_SHA256
    path.write_bytes(path.read_bytes() + b"!")
    got = (hashlib.md5 if kind == "zip" else hashlib.sha256)(path.read_bytes()).hexdigest()
    message = f"{path} is corrupt: its (md5|sha256) must be {expected}, got {got}"
    with pytest.raises(ValueError, match=message):
        find(tmp_path, "background")


@pytest.fixture
def served(tiny, tmp_path, monkeypatch) -> Path:
    """Serve the archives from a folder instead of the network."""
    folder = tmp_path / "served"
    for name in (BACKGROUND, EVALUATION):
        tiny.write_zip(folder, name)
    monkeypatch.setattr(files, "ARCHIVES_URL", folder.as_uri())
    return folder


def test_download_puts_the_archives_into_the_omniglot_folder(served, tmp_path):
    folder = tmp_path / "data" / "omniglot"
    paths = find(folder.parent, "train", download=True)
    assert paths == [folder / f"{BACKGROUND}.zip", folder / f"{EVALUATION}.zip"]
    assert sorted(folder.iterdir()) == sorted(paths)
    assert find(folder, "train", download=True) == paths


def test_a_download_of_the_wrong_bytes_or_of_none_leaves_nothing(served, tmp_path):
    (served / f"{BACKGROUND}.zip").write_bytes(b"an error page")
    with pytest.raises(ValueError, match=r"file://.*images_background\.zip is corrupt: its md5 must be"):
        fetch_archive(BACKGROUND, tmp_path / "omniglot")
    (served / f"{BACKGROUND}.zip").unlink()
    with pytest.raises(OSError, match=r"file://.*could not be fetched .* put the file into .*omniglot"):
        fetch_archive(BACKGROUND, tmp_path / "omniglot")
    assert list((tmp_path / "omniglot").iterdir()) == []


@pytest.mark.parametrize("layout", ["write_zip", "write_tree", "write_bits"])
def test_every_layout_gives_the_same_ink(tiny, tmp_path, layout):
    path = getattr(tiny, layout)(tmp_path, *(() if layout == "write_bits" else (BACKGROUND,)))
    if path.is_dir():
        (path / "Aa/character01/._0000_01.png").write_bytes(b"the attributes that a Mac stores beside a file")
    read = dict(read_drawings(path, SPLITS["background"].characters))
    assert read.keys() == set(SPLITS["background"].characters)
    for k, character in enumerate(SPLITS["background"].characters):
        assert read[character].dtype == np.uint8
        assert np.array_equal(read[character], tiny.ink[k])


def test_drawings_that_are_missing_damaged_or_of_another_size_are_named(tiny, tmp_path, png):
    def check(message):
        with pytest.raises(ValueError, match=message):
            list(read_drawings(path, SPLITS["background"].characters))

    path = tiny.write_tree(tmp_path, BACKGROUND, without="character02/0001_07")
    check(r"must have drawings 1 to 20 of Aa/character02, got \[1, .* 6, 8, ")
    path = tiny.write_tree(tmp_path, BACKGROUND)
    drawing = path / "Bb/character01/0002_03.png"
    drawing.write_bytes(png(np.zeros((105, 104), dtype=int)))
    check(r"Bb/character01/0002_03\.png in .*must be 105x105, got 105x104")
    drawing.write_bytes(b"\x89PNG")
    check(r"0002_03\.png in .* could not be decoded: ")


def test_official_archives_and_the_array_file_hold_the_same_ink(real_small, real_bits):
    characters = SPLITS["small1"].characters
    from_zip, from_bits = (dict(read_drawings(path, characters)) for path in (real_small, real_bits))
    assert from_zip.keys() == from_bits.keys() == set(characters)
    assert all(np.array_equal(from_zip[c], from_bits[c]) for c in characters)


PARTS = {  # each split, its characters, and how the array file marks them
    "train": (1028, lambda t: t["char_vinyals"] == 0),
    "validation": (172, lambda t: t["char_vinyals"] == 1),
    "trainval": (1200, lambda t: t["char_vinyals"] <= 1),
    "test": (423, lambda t: t["char_vinyals"] == 2),
    "background": (964, lambda t: t["char_background"]),
    "evaluation": (659, lambda t: ~t["char_background"]),
    "small1": (136, lambda t: t["char_small1"]),
}


def test_sizes_of_splits_and_parts_that_are_disjoint_and_complete():
    for name, (size, _) in PARTS.items():
        assert len(SPLITS[name].characters) == len(set(SPLITS[name].characters)) == size
    for parts in (("train", "validation", "test"), ("trainval", "test"), ("background", "evaluation")):
        assert len({c for part in parts for c in SPLITS[part].characters}) == 1623


def test_splits_equal_the_membership_that_comes_with_the_data(real_bits):
    with np.load(real_bits, allow_pickle=False) as arrays:
        table = {name: arrays[name] for name in arrays.files if name != "images_packed"}
    for name, (_, select) in PARTS.items():
        mask = select(table)
        alphabets = table["alphabet_names"][table["char_alphabet"]][mask].tolist()
        assert SPLITS[name].characters == tuple(
            map(Character, alphabets, table["char_number"][mask].tolist())
        )
