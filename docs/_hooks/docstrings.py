"""Docstrings have the roles and equations of Sphinx (``:class:`MAML```, ``.. math::``): Markdown learns them here.

Equations become MathML, which browsers show by themselves, so that no page loads anything from elsewhere.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import markdown
from latex2mathml.converter import convert
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor

from docs._hooks.reference import ROOMS, public


class Docstrings(markdown.Extension):
    """The roles and equations that docstrings have."""

    def extendMarkdown(self, md: markdown.Markdown) -> None:  # noqa: N802
        """Register the patterns, before those of code and of paragraphs."""
        md.inlinePatterns.register(Role(r":(\w+):`([^`]+)`", md), "role", 200)
        md.parser.blockprocessors.register(Equation(md.parser), "equation", 200)


class Role(InlineProcessor):
    """``:math:`x``` as an equation, any other role as code that links to what it names, where that is public."""

    def handleMatch(self, m: re.Match[str], data: str) -> Any:  # noqa: N802
        """Return what stands for a role, and where it stands."""
        role, text = m[1], m[2]
        equation = role == "math"
        shown = self.md.htmlStash.store(_equation(text, "inline")) if equation else _reference_to(text)
        return shown, m.start(0), m.end(0)


class Equation(BlockProcessor):
    """``.. math::`` and the lines indented below it."""

    def test(self, parent: ElementTree.Element, block: str) -> bool:
        """Say whether a block begins an equation."""
        return block.startswith(".. math::")

    def run(self, parent: ElementTree.Element, blocks: list[str]) -> None:
        """Take the block; its formula stands in it, or in the next."""
        formula = blocks.pop(0).removeprefix(".. math::").strip() or blocks.pop(0).strip()
        aligned = (
            rf"\begin{{align*}}{formula}\end{{align*}}" if "&" in formula or r"\\" in formula else formula
        )
        shown = f'<div class="equation">{_equation(aligned, "block")}</div>'
        ElementTree.SubElement(parent, "p").text = self.parser.md.htmlStash.store(shown)


def _equation(formula: str, display: str) -> str:
    """Return a formula as MathML; refuse what cannot be said in it."""
    math = convert(formula.replace(r"\arg", r"\operatorname{arg}"), display=display)
    if left := re.findall(r"\\[a-zA-Z]+|<mi>&</mi>", math):
        raise ValueError(f"{formula}: no MathML for {left}. Write it in other terms.")
    # Where a system has no font for mathematics, Chromium leaves a subscript on the line that has no superscript.
    return math.replace("<msub>", "<msubsup>").replace("</msub>", "<mrow /></msubsup>")


def _reference_to(text: str) -> ElementTree.Element:
    path = text.removeprefix("~")
    code = ElementTree.Element("code")
    code.text = markdown.util.AtomicString(path.rpartition(".")[2] if text[0] == "~" else path)
    target = _public_path(path)
    if target is None:
        return code
    link = ElementTree.Element("autoref", {"identifier": target, "optional": ""})
    link.append(code)
    return link


def _public_path(path: str) -> str | None:
    """Return the full path of a public name, or of a member of one, from what a docstring calls it."""
    parts = path.removeprefix("metagrad.").split(".")
    for room in ROOMS:
        called = {getattr(value, "__name__", name): name for name, value in public(room).items()}
        rest = parts[len(room.split(".")) :] if parts[: len(room.split("."))] == room.split(".") else parts
        if rest and rest[0] in called.keys() | called.values():
            return ".".join(["metagrad", room, called.get(rest[0], rest[0]), *rest[1:]])
    return None
