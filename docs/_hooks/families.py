"""The classes with their own page: every algorithm and every optimizer of the library."""

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
"""Base classes, which have no page."""


class Method(NamedTuple):
    """A class with a page.

    Attributes:
        name: Name of the class.
        option: Name in programs and curves.
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
    """Classes with the same kind of page.

    Attributes:
        title: Title on the site.
        package: Package of `metagrad` that exports them.
        kind: Common base class.
        schemas: Options of the programs, by name.
        reference: Option of the method that every figure shows for comparison.
        called: Name of the reference method.
        program: Command that measured the curves.
    """

    title: str
    package: str
    kind: type
    schemas: Mapping[str, type[Target]]
    reference: str
    called: str
    program: str

    @property
    def folder(self) -> str:
        """Folder of the pages."""
        return self.title.lower()

    @property
    def curves(self) -> Path:
        """File of the measured curves."""
        return Path(__file__).parent / "curves" / f"{self.folder}.json"

    def panels(self) -> list[Panel]:
        """Return the measured curves."""
        return read_panels(self.curves)

    def methods(self) -> list[Method]:
        """Return the classes in alphabetical order."""
        module = getattr(metagrad, self.package)
        options = {str(schema._target_).rpartition(".")[2]: option for option, schema in self.schemas.items()}
        names: list[str] = sorted(set(module.__all__) - BASES, key=str.lower)
        classes = {name: getattr(module, name) for name in names}
        return [
            Method(name, options.get(name, name.lower()), made)
            for name, made in classes.items()
            if inspect.isclass(made) and issubclass(made, self.kind)
        ]

    def page(self, method: Method) -> str:
        """Return the path of the page of a class on the site."""
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


def own_pages(package: str) -> dict[str, str]:
    """Return the page of each name of a package that has its own page."""
    return {
        method.name: family.page(method)
        for family in FAMILIES
        if family.package == package
        for method in family.methods()
    }
