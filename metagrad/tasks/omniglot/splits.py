"""Which characters of Omniglot make up each split, and which official archives hold them."""

from __future__ import annotations

from typing import NamedTuple

from metagrad.tasks._groups import published_splits

NUM_DRAWERS = 20  # every character was drawn once by each of 20 people
DRAWING_SIZE = 105  # pixels along a side of a drawing, before resizing

FIRST_TEST_CHARACTER_OF_GURMUKHI = 42  # the one alphabet that a split divides


class Character(NamedTuple):
    """Name a character as the dataset does: its alphabet, and its number in it, from one."""

    alphabet: str
    number: int


class Split(NamedTuple):
    """Say what a split holds.

    Args:
        origin: Who made the split, for printing beside results.
        characters: In the order of the classes: background before evaluation, then alphabet, then number.
        archives: Sets of official archives, without ".zip", each of which holds all the characters.
    """

    origin: str
    characters: tuple[Character, ...]
    archives: tuple[tuple[str, ...], ...]


def _characters(alphabets: dict[str, int]) -> tuple[Character, ...]:
    return tuple(Character(name, k + 1) for name, size in alphabets.items() for k in range(size))


def _make_splits() -> dict[str, Split]:
    known = published_splits()["Omniglot"]
    background, evaluation = _characters(known["background"]), _characters(known["evaluation"])
    one, other = ("images_background",), ("images_evaluation",)

    def part_of(character: Character) -> str:
        if character.alphabet in known["validation"]:
            return "validation"
        is_last = character.alphabet == "Gurmukhi" and character.number >= FIRST_TEST_CHARACTER_OF_GURMUKHI
        return "test" if character.alphabet in known["test"] or is_last else "train"

    def vinyals(*parts: str) -> tuple[Character, ...]:
        return tuple(c for c in background + evaluation if part_of(c) in parts)

    small1 = tuple(c for c in background if c.alphabet in known["small1"])
    of_vinyals, of_lake = "Vinyals et al. 2016", "Lake et al. 2015"
    return {
        "train": Split(of_vinyals, vinyals("train"), (one + other,)),
        "validation": Split(of_vinyals, vinyals("validation"), (one,)),
        "trainval": Split(of_vinyals, vinyals("train", "validation"), (one + other,)),
        "test": Split(of_vinyals, vinyals("test"), (other,)),
        "background": Split(of_lake, background, (one,)),
        "evaluation": Split(of_lake, evaluation, (other,)),
        "small1": Split(of_lake, small1, (("images_background_small1",), one)),
    }


SPLITS = _make_splits()
