"""A Markdown extension for the roles and equations of Sphinx in docstrings (``:class:`MAML```, ``.. math::``).

Equations become MathML, which browsers render without scripts.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import markdown
from latex2mathml.converter import convert
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor

from docs._hooks.reference import PACKAGES, public


class Docstrings(markdown.Extension):
    """Markdown extension for the roles and equations of Sphinx."""

    def extendMarkdown(self, md: markdown.Markdown) -> None:  # noqa: N802
        """Register the patterns with a higher priority than code and paragraphs."""
        md.inlinePatterns.register(Role(r":(\w+):`([^`]+)`", md), "role", 200)
        md.parser.blockprocessors.register(Equation(md.parser), "equation", 200)


class Role(InlineProcessor):
    """Renders ``:math:`x``` as an equation and other roles as code that links to the public name."""

    def handleMatch(self, m: re.Match[str], data: str) -> Any:  # noqa: N802
        """Return the element of a role, and its start and end."""
        role, text = m[1], m[2]
        equation = role == "math"
        shown = self.md.htmlStash.store(_equation(text, "inline")) if equation else _reference_to(text)
        return shown, m.start(0), m.end(0)


class Equation(BlockProcessor):
    """Renders ``.. math::`` and the lines indented below it."""

    def test(self, parent: ElementTree.Element, block: str) -> bool:
        """Return whether a block begins an equation."""
        return block.startswith(".. math::")

    def run(self, parent: ElementTree.Element, blocks: list[str]) -> None:
        """Render the formula, which is in this block or in the next one."""
        formula = blocks.pop(0).removeprefix(".. math::").strip() or blocks.pop(0).strip()
        aligned = (
            rf"\begin{{align*}}{formula}\end{{align*}}" if "&" in formula or r"\\" in formula else formula
        )
        shown = f'<div class="equation">{_equation(aligned, "block")}</div>'
        ElementTree.SubElement(parent, "p").text = self.parser.md.htmlStash.store(shown)


def _equation(formula: str, display: str) -> str:
    """Return a formula as MathML. Raise `ValueError` if the converter does not know a command."""
    math = convert(formula.replace(r"\arg", r"\operatorname{arg}"), display=display)
    if left := re.findall(r"\\[a-zA-Z]+|<mi>&</mi>", math):
        raise ValueError(f"{formula}: no MathML for {left}. Write it in other terms.")
    # Chromium without a math font does not lower a subscript that has no superscript.
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
    """Return the full path of a public name, or of its member, from the name in a docstring."""
    parts = path.removeprefix("metagrad.").split(".")
    for package in PACKAGES:
        called = {getattr(value, "__name__", name): name for name, value in public(package).items()}
        rest = (
            parts[len(package.split(".")) :]
            if parts[: len(package.split("."))] == package.split(".")
            else parts
        )
        if rest and rest[0] in called.keys() | called.values():
            return ".".join(["metagrad", package, called.get(rest[0], rest[0]), *rest[1:]])
    return None
