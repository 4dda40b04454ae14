"""A page for every algorithm and optimizer, and its figures: its curve among those of the others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs._hooks.families import FAMILIES, ROOT, Family, Method
from docs._hooks.method_pages import index_page, method_page, panels_of, picture
from experiments.plots.panels import Panel, highlighted

KEPT = ROOT / ".cache" / "methods"
DRAWN_BY = [ROOT / "experiments" / "plots" / name for name in ("panels.py", "style.py")]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and their figures."""
    for family in FAMILIES:
        panels = family.panels()
        index = index_page(family, panels)
        files.append(File.generated(config, f"{family.folder}/index.md", content=index))
        for method in family.methods():
            text = method_page(family, method, panels)
            files.append(File.generated(config, family.page(method), content=text))
            for number, panel in panels_of(method, panels):
                name, path = f"figures/{picture(family, method, number)}", _figure(family, method, panel)
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def _figure(family: Family, method: Method, panel: Panel) -> Path:
    """Return the figure of a class in a panel; draw it if it is new."""
    state = "".join(file.read_text() for file in DRAWN_BY) + repr((panel, method.name))
    path = KEPT / f"{hashlib.sha256(state.encode()).hexdigest()[:24]}.png"
    if not path.exists():
        called = {family.reference: family.called, method.option: method.name}
        highlighted(path, panel, method.option, family.reference, called)
    return path
