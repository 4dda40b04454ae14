"""Tutorials show the output and figures of their programs, which the build runs and caches."""

from __future__ import annotations

import base64
import multiprocessing
import posixpath
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs._hooks import notebooks
from docs._hooks.addresses import address
from docs._hooks.programs import PROGRAM, ROOT, RUN, Shown, programs
from docs._hooks.results import results


def on_files(files: Files, config: Any) -> Files:
    """Add the figures of the programs, and the notebooks."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(results, RUN))
    for path, shown in zip(RUN, found, strict=True):
        page = _page(path)
        for name, data in _pictures(page, shown).items():
            files.append(File.generated(config, name, content=base64.b64decode(data)))
        if page in notebooks.PAGES:
            content = notebooks.notebook(path.read_text(), shown)
            files.append(File.generated(config, _notebook(page), content=content))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Insert the output and the figures below each program."""
    path, name = ROOT / "docs" / page.file.src_uri, page.file.src_uri
    if path not in RUN:
        return text
    shown = iter(results(path))
    numbers = iter(range(len(programs(text))))
    text = PROGRAM.sub(lambda block: block[0] + _below(next(shown), name, next(numbers)), text)
    return _with_notebook(text, name) if name in notebooks.PAGES else text


def _below(shown: Shown, page: str, number: int) -> str:
    """Return the Markdown of the output and figures of a program."""
    printed = f"\n\n``` {{ .text .output }}\n{shown.printed.rstrip()}\n```" if shown.printed.strip() else ""
    pictures = [
        f"\n\n![{title}]({_picture(posixpath.basename(page), number, index)})"
        for index, (title, _) in enumerate(shown.pictures)
    ]
    return printed + "".join(pictures)


def _pictures(page: str, shown: list[Shown]) -> dict[str, str]:
    return {
        _picture(page, number, index): data
        for number, result in enumerate(shown)
        for index, (_, data) in enumerate(result.pictures)
    }


def _picture(page: str, number: int, index: int) -> str:
    return f"{page.removesuffix('.md')}-{number}-{index}.png"


def _page(path: Path) -> str:
    return str(path.relative_to(ROOT / "docs"))


def _notebook(page: str) -> str:
    return page.removesuffix(".md") + ".ipynb"


def _with_notebook(text: str, page: str) -> str:
    """Add links to the notebook below the title. The viewer reads it from the site of a release."""
    title, _, rest = text.partition("\n")
    download = f"[This page as a notebook]({posixpath.basename(_notebook(page))})"
    site = address("Documentation").removeprefix("https://").strip("/")
    view = f"[open it in nbviewer](https://nbviewer.org/urls/{site}/{_notebook(page)})"
    return f"{title}\n\n{download}, with its outputs, or {view}.\n{rest}"
