"""Docstrings that list the methods that can be chosen by name."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping


def with_methods(doc: str | None, summaries: Mapping[str, str]) -> str:
    """Insert methods into a docstring, at the top of the list after "Methods:"; the docstring is dedented.

    Example:
        >>> from metagrad.curvature.methods import with_methods
        >>> print(with_methods("Sum. Methods:", {"exact": "the diagonal"}))
        Sum. Methods:
        - "exact": the diagonal
    """
    doc = inspect.cleandoc(doc or "Methods:")  # as the compiler does it from Python 3.13 on
    rows = [
        textwrap.fill(f'- "{name}": {summary}', 114, subsequent_indent="  ")
        for name, summary in summaries.items()
    ]
    return doc.replace("Methods:", "\n".join(["Methods:", *rows]), 1)
