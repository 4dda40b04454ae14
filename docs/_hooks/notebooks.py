"""A page as a notebook: prose and programs as cells, with the output from the build of the site."""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from typing import Any

from docs._hooks.addresses import address
from docs._hooks.programs import PROGRAM, ROOT, RUN, Program, Shown, programs

PAGES = [str(path.relative_to(ROOT / "docs")) for path in RUN if programs(path.read_text())]
"""Pages that are also notebooks: the quick start and all tutorials."""
INSTALL = f"%pip install --quiet git+{address('Repository')} matplotlib"
CHECKOUT = (
    f"!git clone --depth 1 {address('Repository')}\n%cd metagrad\n%pip install --quiet '.[experiments]'"
)
_LINK = re.compile(r"\[([^]]*)\]\((?!https?:)[^)]*\)")


def notebook(text: str, shown: list[Shown]) -> str:
    """Return a page as a notebook (nbformat 4.5). Links to other pages become plain text."""
    prose = [_LINK.sub(r"\1", part).strip() for part in PROGRAM.split(text)[::3]]
    needs_checkout = any("python -m experiments" in program.text for program in programs(text))
    cells = [_code(CHECKOUT if needs_checkout else INSTALL, Shown("", []))]
    for part, program, result in zip_longest(prose, programs(text), shown):
        cells.append(_cell("markdown", part))
        if program is not None and "pip install" not in program.text:
            cells.append(_code(_source(program), result or Shown("", [])))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def _source(program: Program) -> str:
    """Return the source of a cell. A program of the shell is a cell that starts with ``%%bash``."""
    return ("%%bash\n" if program.language == "sh" else "") + program.text.strip()


def _cell(kind: str, source: str) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source}


def _code(source: str, result: Shown) -> dict[str, Any]:
    printed = {"output_type": "stream", "name": "stdout", "text": result.printed}
    pictures = [
        {"output_type": "display_data", "data": {"image/png": data, "text/plain": title}, "metadata": {}}
        for title, data in result.pictures
    ]
    outputs = [printed, *pictures] if result.printed else pictures
    return {**_cell("code", source), "execution_count": None, "outputs": outputs}
