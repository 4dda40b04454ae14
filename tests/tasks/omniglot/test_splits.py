from __future__ import annotations

import numpy as np
import pytest

from metagrad.tasks.omniglot.splits import SPLITS, Character

SIZES = {
    "train": 1028,
    "validation": 172,
    "trainval": 1200,
    "test": 423,
    "background": 964,
    "evaluation": 659,
    "small1": 136,
}


@pytest.mark.parametrize("name", SPLITS)
def test_sizes(name):
    characters = SPLITS[name].characters
    assert len(characters) == len(set(characters)) == SIZES[name]


@pytest.mark.parametrize(
    "parts", [("train", "validation", "test"), ("trainval", "test"), ("background", "evaluation")]
)
def test_the_parts_of_a_split_are_disjoint_and_complete(parts):
    together = [c for part in parts for c in SPLITS[part].characters]
    assert len(together) == len(set(together)) == 1623


@pytest.fixture
def table(real_bits) -> dict[str, np.ndarray]:
    with np.load(real_bits, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name != "images_packed"}


def characters_where(table, mask: np.ndarray) -> tuple[Character, ...]:
    names = table["alphabet_names"][table["char_alphabet"]][mask].tolist()
    return tuple(map(Character, names, table["char_number"][mask].tolist()))


@pytest.mark.parametrize(
    ("name", "select"),
    [
        ("train", lambda t: t["char_vinyals"] == 0),
        ("validation", lambda t: t["char_vinyals"] == 1),
        ("trainval", lambda t: t["char_vinyals"] <= 1),
        ("test", lambda t: t["char_vinyals"] == 2),
        ("background", lambda t: t["char_background"]),
        ("evaluation", lambda t: ~t["char_background"]),
        ("small1", lambda t: t["char_small1"]),
    ],
)
def test_the_tables_equal_the_membership_that_comes_with_the_data(table, name, select):
    assert SPLITS[name].characters == characters_where(table, select(table))
