"""The text of the page of an algorithm or optimizer: its docstring, what was measured of it, our figures of that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from docs._hooks.families import ROOT, Family, Method
from experiments.run.files import markdown
from experiments.run.plots.panels import Curve, Panel
from metagrad.optim import rules

SPELLED = {"KFAC": "K-FAC", "LBFGS": "L-BFGS", "MAMLPlusPlus": "MAML++", "MetaSGD": "Meta-SGD"}
SPELLED |= {"MetaCurvature": "Meta-Curvature", "SophiaG": "Sophia-G", "SophiaH": "Sophia-H"}
"""Names as prose has them."""
PROSE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def method_page(family: Family, method: Method, panels: list[Panel]) -> str:
    """Return the page of a class.

    Raises:
        ValueError: It was not measured.
    """
    own = panels_of(method, panels)
    if not own:
        raise ValueError(
            f"{method.name} has no curve in {family.curves.relative_to(ROOT)}: measure it by `{family.program}`, and "
            "copy the curves.json of its folder there."
        )
    pictures = "\n".join(
        f"![{method.name} among the others, {panel.title}](../figures/{picture(family, method, number)})"
        for number, panel in own
    )
    parts = [
        f"---\ntitle: {method.name}\nsearch:\n  boost: 3\n---",
        f"::: metagrad.{family.room}.{method.name}\n    options:\n      heading_level: 1",
        "## What we measured",
        f'<div class="panels" markdown="1">\n{pictures}\n</div>',
        "\n".join(_table(family, method, own)),
        " ".join(
            filter(None, [PROSE[family.title]["notes"].get(method.name), PROSE[family.title]["protocol"]])
        ),
        f"```sh\n{family.program}\n```",
        *_measurements(method),
        "## Where to read on",
        _links(family, method),
    ]
    return "\n\n".join(parts) + "\n"


def index_page(family: Family, panels: list[Panel]) -> str:
    """Return the page that lists the classes of a family."""
    header = ["name", "what it is, and the paper", *(_short(panel) for panel in panels)]
    rows = [
        [
            f"[{method.name}]({method.option}.md)",
            f"{_sentence(method)} {method.paper}",
            *(_end(panel.curves.get(method.option)) for panel in panels),
        ]
        for method in family.methods()
    ]
    prose = PROSE[family.title]
    columns = ", ".join(f"{_short(panel)} the {_lower(panel.y)}" for panel in panels)
    parts = [
        f"# {family.title}",
        f"{prose['about']} The page of each has its equation, its arguments, an example and our figure. The last "
        f"columns are what was measured {prose['columns']}: of {columns}.",
        markdown([header, *rows]),
        "## How they were measured",
        prose["protocol"],
        f"```sh\n{family.program}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _table(family: Family, method: Method, own: list[tuple[int, Panel]]) -> list[str]:
    """Return what came out at the end of each panel, beside the reference, and by which settings."""
    shown = {method.option: method.name, family.reference: family.called}
    rows = [
        [
            panel.title,
            _lower(panel.y),
            *(_end(panel.curves.get(name)) for name in shown),
            panel.curves[method.option].said,
        ]
        for _, panel in own
    ]
    return markdown([["where", "what", *shown.values(), "trained by"], *rows])


def _short(panel: Panel) -> str:
    return panel.title.partition(",")[0]


def _sentence(method: Method) -> str:
    """Return the first line of a docstring, without what all of them begin with."""
    words = re.sub(r"^Optimize (by )?", "", method.about).replace("|", "\\|")
    return words[0].upper() + words[1:]


def _lower(words: str) -> str:
    return words[0].lower() + words[1:]


def _end(curve: Curve | None) -> str:
    """Say what a curve ends at."""
    if curve is None:
        return ""
    last = f"{curve.middle[-1]:.2g}" if curve.middle[-1] < 10 else f"{curve.middle[-1]:.3g}"
    return "< 1e-15" if curve.middle[-1] <= 1e-15 else last


def _measurements(method: Method) -> list[str]:
    """Return a sentence with a link, if the benchmarks name a class."""
    spelled = "|".join(map(re.escape, {method.name, SPELLED.get(method.name, method.name)}))
    is_named = re.search(
        rf"(?<![\w.+-])({spelled})(?![\w+]|-\w)", (ROOT / "docs" / "benchmarks.md").read_text()
    )
    return (
        [f"More measurements of {method.name} are on the page of [benchmarks](../benchmarks.md)."]
        if is_named
        else []
    )


def _links(family: Family, method: Method) -> str:
    """Return where else a class appears."""
    guide = {"meta": "meta-learning](../meta_learning.md)", "optim": "optimizers](../optimizers.md)"}[
        family.room
    ]
    program = (
        f"train algorithm={method.option}"
        if family.room == "meta"
        else f"optimizers optimizer={method.option}"
    )
    links = [
        f"The guide of [{guide}, and [all {family.title.lower()}](index.md).",
        f"From the command line: `python -m experiments.{program}`.",
    ]
    if method.option in rules.__all__:
        rule = f"[`rules.{method.option}`][metagrad.optim.rules.{method.option}]"
        links.insert(1, f"In inner loops it is {rule}, which is differentiated through.")
    return "\n".join(f"- {link}" for link in links)


def panels_of(method: Method, panels: list[Panel]) -> list[tuple[int, Panel]]:
    """Return the panels that have a curve of a class, with their numbers."""
    return [(number, panel) for number, panel in enumerate(panels) if method.option in panel.curves]


def picture(family: Family, method: Method, number: int) -> str:
    """Return the name of the figure of a class in a panel."""
    return f"{family.folder}-{method.option}-{number}.png"
