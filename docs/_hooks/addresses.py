"""The addresses of the project, from ``[project.urls]`` of pyproject.toml.

``python docs/_hooks/addresses.py`` lists the placeholders that a release has to fill in.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "ORGANIZATION"
PLACES = ["pyproject.toml", "README.md", "CITATION.cff", "docs/*.md", "experiments/*.md"]


def address(name: str) -> str:
    """Return an address by its name in ``[project.urls]``."""
    urls = (ROOT / "pyproject.toml").read_text().partition("[project.urls]\n")[2].partition("\n[")[0]
    return dict(re.findall(r'^(\w+) = "(.*)"$', urls, re.MULTILINE))[name]


def placeholders() -> list[str]:
    """Return the lines that hold the placeholder, as ``file:line``."""
    files = [file for place in PLACES for file in sorted(ROOT.glob(place))]
    return [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if PLACEHOLDER in line
    ]


if __name__ == "__main__":
    if found := placeholders():
        print(f"Replace {PLACEHOLDER} by the owner of the repository in", *found, sep="\n  ")
    sys.exit(bool(found))
