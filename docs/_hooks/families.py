"""What has a page of its own: every algorithm and every optimizer of the library, found by what it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import nn, optim

import metagrad
from experiments.run.plots.panels import Panel, read_panels
from experiments.run.schema import Target
from experiments.run.schemas import ALGORITHMS, OPTIMIZERS

ROOT = Path(__file__).resolve().parents[2]
BASES = {"HeadAlgorithm"}
"""Classes that others are made of."""


class Method(NamedTuple):
    """A class with a page.

    Attributes:
        name: Of the class.
        option: What programs and curves call it.
        made: The class.
    """

    name: str
    option: str
    made: type

    @property
    def about(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.made) or "").partition("\n")[0]

    @property
    def paper(self) -> str:
        """Authors, venue and year of its first reference."""
        references = " ".join((inspect.getdoc(self.made) or "").partition("References:")[2].split())
        first = re.match(
            r'(?P<authors>.*?),? (".*?",? )?(?P<venue>[^",;]*?(?:, )?\(?(19|20)\d\d\b|arXiv:[\d.]+\d)',
            references,
        )
        if first is None:
            return ""
        authors = first["authors"].rstrip(",").split(", ")
        short = ", ".join(authors) if len(authors) < 4 else f"{authors[0]} et al."
        return f"{short}, {first['venue']}"


class Family(NamedTuple):
    """Classes whose pages are alike.

    Attributes:
        title: What the site calls them.
        room: Where they are public.
        kind: What each of them is.
        schemas: Their options, in the programs.
        reference: The option that the others are drawn beside.
        called: Its name.
        program: What measured the curves, in the folder of the program.
    """

    title: str
    room: str
    kind: type
    schemas: Mapping[str, type[Target]]
    reference: str
    called: str
    program: str

    @property
    def folder(self) -> str:
        """The folder of their pages."""
        return self.title.lower()

    @property
    def curves(self) -> Path:
        """The file of the curves that their figures draw."""
        return Path(__file__).parent / "curves" / f"{self.folder}.json"

    def panels(self) -> list[Panel]:
        """Return these curves."""
        return read_panels(self.curves)

    def methods(self) -> list[Method]:
        """Return the classes, in the order of the alphabet."""
        module = getattr(metagrad, self.room)
        options = {str(schema._target_).rpartition(".")[2]: option for option, schema in self.schemas.items()}
        names: list[str] = sorted(set(module.__all__) - BASES, key=str.lower)
        classes = {name: getattr(module, name) for name in names}
        return [
            Method(name, options.get(name, name.lower()), made)
            for name, made in classes.items()
            if inspect.isclass(made) and issubclass(made, self.kind)
        ]

    def page(self, method: Method) -> str:
        """Return where the site has the page of a class."""
        return f"{self.folder}/{method.option}.md"


FAMILIES = [
    Family(
        "Algorithms",
        "meta",
        nn.Module,
        ALGORITHMS,
        "maml",
        "MAML",
        "python -m experiments.studies.algorithms",
    ),
    Family(
        "Optimizers",
        "optim",
        optim.Optimizer,
        OPTIMIZERS,
        "adam",
        "Adam",
        "python -m experiments.studies.optimizers preset=pages 'seeds=[0]'",
    ),
]


def own_pages(room: str) -> dict[str, str]:
    """Return the pages of those names of a room that have one."""
    return {
        method.name: family.page(method)
        for family in FAMILIES
        if family.room == room
        for method in family.methods()
    }
