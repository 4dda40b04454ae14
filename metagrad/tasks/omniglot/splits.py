"""Which characters of Omniglot make up each split, and which official archives hold them."""

from __future__ import annotations

from typing import NamedTuple

NUM_DRAWERS = 20  # every character was drawn once by each of 20 people
DRAWING_SIZE = 105  # pixels along a side of a drawing, before resizing

# Number of characters of every alphabet, in the dataset's own two halves.
BACKGROUND = {
    "Alphabet_of_the_Magi": 20,
    "Anglo-Saxon_Futhorc": 29,
    "Arcadian": 26,
    "Armenian": 41,
    "Asomtavruli_(Georgian)": 40,
    "Balinese": 24,
    "Bengali": 46,
    "Blackfoot_(Canadian_Aboriginal_Syllabics)": 14,
    "Braille": 26,
    "Burmese_(Myanmar)": 34,
    "Cyrillic": 33,
    "Early_Aramaic": 22,
    "Futurama": 26,
    "Grantha": 43,
    "Greek": 24,
    "Gujarati": 48,
    "Hebrew": 22,
    "Inuktitut_(Canadian_Aboriginal_Syllabics)": 16,
    "Japanese_(hiragana)": 52,
    "Japanese_(katakana)": 47,
    "Korean": 40,
    "Latin": 26,
    "Malay_(Jawi_-_Arabic)": 40,
    "Mkhedruli_(Georgian)": 41,
    "N_Ko": 33,
    "Ojibwe_(Canadian_Aboriginal_Syllabics)": 14,
    "Sanskrit": 42,
    "Syriac_(Estrangelo)": 23,
    "Tagalog": 17,
    "Tifinagh": 55,
}
EVALUATION = {
    "Angelic": 20,
    "Atemayar_Qelisayer": 26,
    "Atlantean": 26,
    "Aurek-Besh": 26,
    "Avesta": 26,
    "Ge_ez": 26,
    "Glagolitic": 45,
    "Gurmukhi": 45,
    "Kannada": 41,
    "Keble": 26,
    "Malayalam": 47,
    "Manipuri": 40,
    "Mongolian": 30,
    "Old_Church_Slavonic_(Cyrillic)": 45,
    "Oriya": 46,
    "Sylheti": 28,
    "Syriac_(Serto)": 23,
    "Tengwar": 25,
    "Tibetan": 42,
    "ULOG": 26,
}

# The split of Vinyals et al. takes whole alphabets, but for the last four characters of Gurmukhi.
VALIDATION = ("Armenian", "Bengali", "Early_Aramaic", "Hebrew", "Mkhedruli_(Georgian)")
TEST = (
    "Kannada",
    "Keble",
    "Malayalam",
    "Manipuri",
    "Mongolian",
    "Old_Church_Slavonic_(Cyrillic)",
    "Oriya",
    "Sylheti",
    "Syriac_(Serto)",
    "Tengwar",
    "Tibetan",
    "ULOG",
)
FIRST_TEST_CHARACTER_OF_GURMUKHI = 42

SMALL1 = ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin")


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


def _vinyals_part(character: Character) -> str:
    if character.alphabet in VALIDATION:
        return "validation"
    last_of_gurmukhi = (
        character.alphabet == "Gurmukhi" and character.number >= FIRST_TEST_CHARACTER_OF_GURMUKHI
    )
    return "test" if character.alphabet in TEST or last_of_gurmukhi else "train"


def _make_splits() -> dict[str, Split]:
    background, evaluation = _characters(BACKGROUND), _characters(EVALUATION)
    everything = background + evaluation
    one, other = ("images_background",), ("images_evaluation",)

    def vinyals(*parts: str) -> tuple[Character, ...]:
        return tuple(c for c in everything if _vinyals_part(c) in parts)

    small1 = tuple(c for c in background if c.alphabet in SMALL1)
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
