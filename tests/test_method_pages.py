"""Every public algorithm and optimizer has a page with its equation, paper, example and measurement."""

import inspect
import re

import pytest

import metagrad
from docs._hooks.families import FAMILIES, Method
from docs._hooks.method_pages import index_page, method_page, picture
from experiments.run.plots.panels import Curve, Panel, highlighted, read_panels, write_panels

METHODS = [(family, method) for family in FAMILIES for method in family.methods()]
NAMES = [method.name for _, method in METHODS]


@pytest.mark.parametrize(("family", "method"), METHODS, ids=NAMES)
def test_every_method_has_equation_paper_and_example(family, method):
    docstring = inspect.getdoc(method.made) or ""
    assert [part for part in (".. math::", "Args:", "Example", "References:") if part not in docstring] == []
    assert re.search(r"\d{4}", method.paper)


@pytest.mark.parametrize("family", FAMILIES, ids=[family.title for family in FAMILIES])
def test_every_method_has_a_page_with_a_figure_and_a_row(family):
    panels = family.panels()
    index = index_page(family, panels)
    for method in family.methods():
        text = method_page(family, method, panels)
        assert f"::: metagrad.{family.package}.{method.name}\n" in text
        assert re.search(r"^\| problem \| quantity \| .*\n\| --- \|.*\n\| \w", text, re.MULTILINE)
        assert re.search(rf"!\[.*\]\(../figures/{family.folder}-{method.option}-\d.png\)", text)
        assert re.search(rf"^\| \[{method.name}\]\({method.option}.md\) \|.*\d", index, re.MULTILINE)
        assert not re.search(r"\bnan\b", text.partition("## What we measured")[2])


def test_the_families_have_what_the_library_exports():
    assert {"MAML", "iMAML", "ProtoNet", "KFAC", "LBFGS", "SparseAdam"} <= set(NAMES)
    assert not {"HeadAlgorithm", "AdaptedModel", "least_squares"} & set(NAMES)
    assert len(NAMES) == len(set(NAMES)) == len({picture(family, method, 0) for family, method in METHODS})


def test_a_method_that_was_not_measured_is_an_error():
    family = FAMILIES[0]
    with pytest.raises(
        ValueError, match=r"MyMAML has no curve in docs/_hooks/curves/algorithms.json: measure it by"
    ):
        method_page(family, Method("MyMAML", "my_maml", metagrad.MAML), family.panels())


def test_panels_are_read_as_they_were_written_and_drawn(tmp_path):
    curves = {
        "a": Curve([1.0, 2.0], [0.5, 0.25], [0.5, 0.2], [0.5, 0.3], "3 steps"),
        "b": Curve(None, [0.3], [0.2], [0.4]),
    }
    panel = Panel("Title", "x", "y", "linear", "log", curves)
    write_panels(tmp_path / "curves.json", [panel, panel])
    assert read_panels(tmp_path / "curves.json") == [panel, panel]
    path = highlighted(tmp_path / "figure.png", panel, "b", "a", {"a": "A", "b": "B"})
    assert path.stat().st_size > 5_000
