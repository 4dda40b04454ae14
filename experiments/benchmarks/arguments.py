"""Parse words of a command line."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable


def add_words(
    parser: ArgumentParser, name: str, known: Iterable[str], default: list[str] | None = None
) -> None:
    """Add an argument that takes known words, by default all. An unknown word raises an error that lists them."""
    known = list(known)

    def word(text: str) -> str:
        if text not in known:
            raise ArgumentTypeError(f"{text}: expected any of {', '.join(known)}")
        return text

    nargs, about = "+" if name.startswith("-") else "*", f"any of {', '.join(known)}"
    default = known if default is None else default
    parser.add_argument(name, nargs=nargs, type=word, metavar="NAME", default=default, help=about)
