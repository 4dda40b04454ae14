"""The text of the page of an algorithm or optimizer: its docstring, our measurements and figures."""

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
"""Names in prose, by class name."""
PROSE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def method_page(family: Family, method: Method, panels: list[Panel]) -> str:
    """Return the page of a class.

    Raises:
        ValueError: No panel has a curve of the class.
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
        f"::: metagrad.{family.package}.{method.name}\n    options:\n      heading_level: 1",
        "## What we measured",
        f'<div class="panels" markdown="1">\n{pictures}\n</div>',
        _table(family, method, own),
        " ".join(
            filter(None, [PROSE[family.title]["notes"].get(method.name), PROSE[family.title]["protocol"]])
        ),
        f"```sh\n{family.program}\n```",
        *_measurements(method),
        "## See also",
        _links(family, method),
    ]
    return "\n\n".join(parts) + "\n"


def index_page(family: Family, panels: list[Panel]) -> str:
    """Return the page that lists the classes of a family."""
    prose = PROSE[family.title]
    long = prose.get("long", {"title": None, "values": {}})
    shown = {panel.title: panel for panel in panels if panel.title in prose["panels"]}
    header = ["name", "description and paper", long["title"], *map(prose["panels"].get, shown)]
    methods = [
        (f"[{m.name}]({m.option}.md)", f"{_sentence(m)} {m.paper}", m.name, m.option)
        for m in family.methods()
    ]
    if family.reference not in [option for *_, option in methods]:
        methods.append((family.called, "For comparison: `torch.optim`.", family.called, family.reference))
    rows = [
        [
            link,
            about,
            str(long["values"].get(name, "")),
            *(_end(p.curves.get(option)) for p in shown.values()),
        ]
        for link, about, name, option in methods
    ]
    columns = [n for n, title in enumerate(header) if title is not None]
    parts = [
        f"# {family.title}",
        f"{prose['about']} {prose['columns']}",
        markdown([[row[n] for n in columns] for row in [header, *rows]]),
        "## How they were measured",
        " ".join(filter(None, [long.get("protocol"), prose["protocol"]])),
        f"```sh\n{family.program}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _table(family: Family, method: Method, own: list[tuple[int, Panel]]) -> str:
    """Return a table of the final values in each panel, next to the reference, with the settings."""
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
    return markdown([["problem", "quantity", *shown.values(), "settings"], *rows])


def _sentence(method: Method) -> str:
    """Return the first line of a docstring, without what all of them begin with."""
    words = re.sub(r"^Optimize (by )?", "", method.about).replace("|", "\\|")
    return words[0].upper() + words[1:]


def _lower(words: str) -> str:
    return words[0].lower() + words[1:]


def _end(curve: Curve | None) -> str:
    """Return the final value of a curve as text."""
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
    """Return links to other pages about a class."""
    guide = {"meta": "meta-learning](../meta_learning.md)", "optim": "optimizers](../optimizers.md)"}[
        family.package
    ]
    program = (
        f"train algorithm={method.option}"
        if family.package == "meta"
        else f"studies.optimizers 'optimizers=[{method.option}]'"
    )
    links = [
        f"The guide to [{guide} and [all {family.title.lower()}](index.md).",
        f"On the command line: `python -m experiments.{program}`.",
    ]
    if method.option in rules.__all__:
        rule = f"[`rules.{method.option}`][metagrad.optim.rules.{method.option}]"
        links.insert(1, f"Functional form for inner loops: {rule}.")
    return "\n".join(f"- {link}" for link in links)


def panels_of(method: Method, panels: list[Panel]) -> list[tuple[int, Panel]]:
    """Return the panels that have a curve of a class, with their numbers."""
    return [(number, panel) for number, panel in enumerate(panels) if method.option in panel.curves]


def picture(family: Family, method: Method, number: int) -> str:
    """Return the name of the figure of a class in a panel."""
    return f"{family.folder}-{method.option}-{number}.png"
