"""The characters and the official archives of each split of Omniglot."""

from __future__ import annotations

from typing import NamedTuple

from metagrad.tasks._groups import published_splits

NUM_DRAWERS = 20  # writers, who drew every character once
DRAWING_SIZE = 105  # height and width of the images of the files in pixels
FIRST_TEST_CHARACTER_OF_GURMUKHI = 42  # the one alphabet that a split divides


class Character(NamedTuple):
    """A character: its alphabet and its number in the alphabet, starting at 1."""

    alphabet: str
    number: int


class Split(NamedTuple):
    """A split of the characters.

    Args:
        origin: The paper that defines the split.
        characters: Characters in the order of the classes: background before evaluation, then alphabet, then number.
        archives: Alternative sets of official archives, without ".zip". Each set contains all the characters.
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
