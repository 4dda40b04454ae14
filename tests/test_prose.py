"""Prose follows the style rules that a regular expression can see: bounds per area that only go down."""

import pytest

from tests.prose import LONG, ROOT, Prose, files, measure, offenders

AREAS = {  # markers for 1,000 sentences and the share of long sentences in %: the goal is (5, 12) everywhere
    "pages": (5, 12),
    "metagrad": (0, 12),
    "tests": (5, 12),
    "experiments": (5, 12),
    "metagrad/attribution": (5, 12),
    "metagrad/autograd": (5, 12),
    "metagrad/core": (0, 12),
    "metagrad/curvature": (5, 12),
    "metagrad/distributed": (5, 12),
    "metagrad/hypergrad": (5, 12),
    "metagrad/memory": (5, 12),
    "metagrad/meta": (5, 12),
    "metagrad/models": (0, 12),
    "metagrad/optim": (5, 12),
    "metagrad/sparse": (5, 12),
    "metagrad/tasks": (5, 12),
    "metagrad/training": (5, 12),
}


def paths(area):
    if area == "pages":
        return [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *(ROOT / "docs").rglob("*.md")]
    if area == "metagrad":
        return sorted((ROOT / "metagrad").glob("*.py"))
    return files(ROOT / area)


@pytest.mark.parametrize("area", AREAS)
def test_prose_does_not_get_worse(area):
    markers, long, _, found = measure(paths(area))
    shown = [f"{path.relative_to(ROOT)}:{line}: [{rule}] {sentence}" for path, line, rule, sentence in found]
    assert markers <= AREAS[area][0], "\n".join(shown[:20])
    assert long <= AREAS[area][1], "\n".join(line for line in shown if "[1 long]" in line)


def test_every_folder_has_a_bound():
    folders = [path for path in (ROOT / "metagrad").iterdir() if path.is_dir() and files(path)]
    assert {str(folder.relative_to(ROOT)) for folder in folders} <= AREAS.keys()


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("2", "What remains. Where is it? Keep it."),
        ("3", "The peak is that of a step. Keep those. In which case?"),
        ("5", "A cut is refused. It raises."),
        ("7", "Say whether it is one. It says so."),
        ("9", "Only the rows. The rows alone. Too many rows."),
        ("12", "One `a; b` (x) f(y) is fine. This; that. A: b."),
        ("14", "Start anew. Start again."),
        ("15", "We optimise. We optimize. They rise."),
    ],
)
def test_a_marker_is_found_once(tmp_path, rule, text):
    (tmp_path / "page.md").write_text(text)
    assert [offence[1].split()[0] for offence in offenders(tmp_path / "page.md")[1]] == [rule]


def test_sentences_are_those_of_docstrings_and_comments_without_code(tmp_path):
    source = '''def f(x):
    """Return one; or two.

    .. math:: a; b

    Args:
        x: A number, e.g. 2. Or
            a tensor.

    Example:
        >>> f(1); f(2)
        1
    """
    y = "no; prose"  # noqa: E501
    # A comment
    # of two lines.
    return y
'''
    (tmp_path / "module.py").write_text(source)
    assert Prose(tmp_path / "module.py").sentences == [
        (2, "Return one; or two."),
        (7, "A number, e.g 2."),
        (7, "Or a tensor."),
        (15, "A comment of two lines."),
    ]


def test_long_sentences_are_counted_in_paragraphs_items_and_cells(tmp_path):
    long = " ".join(["word"] * (LONG + 1))
    page = f"# {long}\n\n```\n{long}\n```\n\n{long}\n\n- {long}\n\n| a word | {long} |\n"
    (tmp_path / "page.md").write_text(page)
    markers, share, total, found = measure([tmp_path / "page.md"])
    assert (markers, share, total, [line for _, line, *_ in found]) == (0, 75, 4, [7, 9, 11])
