"""A page for every algorithm and optimizer, with figures that highlight its curve."""

from __future__ import annotations

import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.structure.files import File, Files

from docs._hooks.families import FAMILIES, ROOT
from docs._hooks.method_pages import index_page, method_page, panels_of, picture
from experiments.run.plots.panels import Panel, highlighted

KEPT = ROOT / ".cache" / "methods"
DRAWN_BY = [
    ROOT / name
    for name in (
        "metagrad/plots.mplstyle",
        "experiments/run/plots/panels.py",
        "experiments/run/plots/style.py",
    )
]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and their figures."""
    figures: dict[str, Figure] = {}
    for family in FAMILIES:
        panels = family.panels()
        index = index_page(family, panels)
        files.append(File.generated(config, f"{family.folder}/index.md", content=index))
        for method in family.methods():
            text = method_page(family, method, panels)
            files.append(File.generated(config, family.page(method), content=text))
            for number, panel in panels_of(method, panels):
                called = {family.reference: family.called, method.option: method.name}
                name = f"figures/{picture(family, method, number)}"
                figures[name] = Figure(panel, method.option, family.reference, called)
    for name, path in zip(figures, _drawn(list(figures.values())), strict=True):
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


class Figure(NamedTuple):
    """The arguments of `highlighted` for one figure."""

    panel: Panel
    name: str
    reference: str
    called: dict[str, str]


def _drawn(figures: list[Figure]) -> list[Path]:
    """Return the files of figures. Two processes draw the new ones."""
    code = "".join(file.read_text() for file in DRAWN_BY)
    states = [hashlib.sha256(f"{code}{figure}".encode()).hexdigest()[:24] for figure in figures]
    paths = [KEPT / f"{state}.png" for state in states]
    new = {path: figure for path, figure in zip(paths, figures, strict=True) if not path.exists()}
    if new:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(highlighted, new, *zip(*new.values(), strict=True), chunksize=8))
    for old in set(KEPT.glob("*.png")) - set(paths):
        old.unlink()
    return paths
