"""What the documents show holds: their programs run, their links, commands and options exist, and they stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from metagrad.optim import rules

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        ".github/*.md",
        "docs/**/*.md",
        "experiments/**/*.md",
        "metagrad/**/*.md",
        "tests/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
GUIDES = {
    "docs/autograd.md",
    "docs/curvature.md",
    "docs/memory.md",
    "docs/meta_learning.md",
    "docs/optimizers.md",
    "docs/sparse.md",
}
LONGEST = {"README.md": 200, "metagrad/**/README.md": 40, "docs/decisions/*.md": 10}  # lines
OPTIONS = re.compile(r"\b(algorithm/inner|experiment|optimizer|workload|preset|problem|algorithm)=([\w,]+)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def programs(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


WITH_PROGRAMS = [path for path in DOCUMENTS if programs(path)]


def test_the_readme_and_the_guides_have_programs():
    assert {"README.md", *GUIDES} <= {name(path) for path in WITH_PROGRAMS}


@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=name)
def test_programs_of_documents_run(path, capsys):
    torch.manual_seed(0)
    session: dict[str, object] = {}
    for program in programs(path):
        exec(compile(program, name(path), "exec"), session)
    if name(path) == "docs/memory.md":
        assert "Each inner step adds" in capsys.readouterr().out


def headings(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_of_documents_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if link.startswith("http"):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_of_documents_exist(path):
    text = path.read_text()
    for module in re.findall(r"\b((?:experiments|metagrad)(?:\.[a-z_]\w*)+)(?=[` ])", text):
        if f"python -m {module}" not in text:
            continue
        place = ROOT.joinpath(*module.split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    for target in re.findall(r"\bmake ([a-z][\w-]*)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_options_of_documents_exist(path):
    for command in re.findall(
        r"python -m experiments\.(?:train|curvature|optimizers)\b[^\n`]*", path.read_text()
    ):
        for group, options in OPTIONS.findall(command):
            for option in options.split(","):
                assert is_option(group, option), f"{group}={option}"


def is_option(group: str, option: str) -> bool:
    if group == "algorithm/inner":
        return hasattr(rules, option)
    return option == "glob" or (ROOT / "conf" / group / f"{option}.yaml").is_file()


@pytest.mark.parametrize("pattern", LONGEST)
def test_documents_are_short(pattern):
    for path in ROOT.glob(pattern):
        assert len(path.read_text().splitlines()) <= LONGEST[pattern], name(path)
