"""A page as a notebook: its prose and its programs as cells, and what the programs showed when the site was built."""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from typing import Any

from docs._hooks.programs import PROGRAM, Shown, programs

PAGES = ["quickstart.md", "tutorials/curvature.md"]
"""Pages that are notebooks too."""
INSTALL = "%pip install --quiet metagrad matplotlib"
_LINK = re.compile(r"\[([^]]*)\]\((?!https?:)[^)]*\)")


def notebook(text: str, shown: list[Shown]) -> str:
    """Return a page as a notebook (nbformat 4.5); links to other pages are their words alone."""
    prose = [_LINK.sub(r"\1", part).strip() for part in PROGRAM.split(text)[::3]]
    cells = [_code(INSTALL, Shown("", []))]
    for part, program, result in zip_longest(prose, programs(text), shown):
        cells.append(_cell("markdown", part))
        if program is not None and program.language == "python":
            cells.append(_code(program.text.strip(), result or Shown("", [])))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)


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
