"""What `make docs` adds to MkDocs: pages from outside of docs/, figures, a reference, and docstrings as they stand.

Docstrings have the roles and equations of Sphinx (``:class:`MAML```, ``.. math::``). Equations become MathML, which
browsers show by themselves, so that no page loads anything from elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import griffe
import markdown
from latex2mathml.converter import convert
from markdown.blockprocessors import BlockProcessor
from markdown.inlinepatterns import InlineProcessor
from mkdocs.structure.files import File, Files

import metagrad

ROOT = Path(__file__).resolve().parents[1]
ROOMS = [room for room in metagrad.__all__ if inspect.ismodule(getattr(metagrad, room))]
ROOMS += ["optim.rules", "info"]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    "experiments/README.md": "experiments.md",
    "docs/decisions": "decisions/index.md",
    **{
        str(path.relative_to(ROOT)): f"rooms/{path.parent.name}.md"
        for path in ROOT.glob("metagrad/*/README.md")
    },
}
"""Pages that stand outside of docs/, by their paths in the repository."""

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@functools.cache
def public(room: str) -> dict[str, object]:
    """Return the public names of a room of the library, and what they are."""
    module = importlib.import_module(f"metagrad.{room}")
    names = getattr(module, "__all__", [name for name in vars(module) if _is_own(module, name)])
    return {name: value for name in names if not inspect.ismodule(value := getattr(module, name))}


def _is_own(module: Any, name: str) -> bool:
    return name[0] != "_" and getattr(vars(module)[name], "__module__", None) == module.__name__


# Pages


def on_config(config: Any) -> Any:
    """Write the patterns of the navigation out, and teach Markdown what docstrings have."""
    config.nav = list(_expanded(config.nav))
    config.markdown_extensions.append(Docstrings())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/, the figures that pages show, and the reference."""
    for source, page in PAGES.items():
        text = _index_of(source) if (ROOT / source).is_dir() else (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    for figure in _figures(files):
        files.append(File.generated(config, f"figures/{Path(figure).name}", abs_src_path=str(ROOT / figure)))
    files.append(File.generated(config, "reference/index.md", content=_names()))
    for room in ROOMS:
        files.append(File.generated(config, _reference(room), content=_reference_page(room)))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Let the links of a page point to where the site has what they name."""
    here = page.file.src_uri
    source = _sources().get(here, f"docs/{here}")
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        place = posixpath.relpath(_place(target), posixpath.dirname(here) or ".")
        return f"{link[1]}{place}{link[3] or ''}{link[4]}"

    if here.startswith("reference/"):
        return text
    programs = _FENCE.findall(text)
    parts = [_LINK.sub(moved, part) for part in _FENCE.split(text)]
    return "".join(part + program for part, program in zip(parts, [*programs, ""], strict=True))


def _place(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path.endswith(".png"):
        return f"figures/{posixpath.basename(path)}"
    return PAGES.get(path, path.removeprefix("docs/"))


def _sources() -> dict[str, str]:
    return {page: source for source, page in PAGES.items()}


def _figures(files: Files) -> set[str]:
    """Return the pictures, outside of docs/, that pages show."""
    pages = [(ROOT / "docs" / file.src_uri, file.content_string) for file in files.documentation_pages()]
    found = {link[2] for _, text in pages for link in _LINK.finditer(text) if link[2].endswith(".png")}
    return {path.removeprefix("../") for path in found}


def _index_of(folder: str) -> str:
    """Return a page that lists the pages of a folder by their titles."""
    pages = sorted((ROOT / folder).glob("*.md"))
    titles = [page.read_text().partition("\n")[0].lstrip("# ") for page in pages]
    lines = [f"- [{title}]({page.stem}.md)" for title, page in zip(titles, pages, strict=True)]
    return "\n".join([f"# {Path(folder).name.capitalize()}", "", *lines, ""])


def _expanded(items: list[Any]) -> Iterator[Any]:
    """Yield the items of a navigation; in place of a pattern, the pages that it fits."""
    for item in items:
        if isinstance(item, str) and "*" in item:
            yield from (page for page in _all_pages() if fnmatch(page, item) and "index" not in page)
        elif isinstance(item, dict):
            yield {
                title: list(_expanded(part)) if isinstance(part, list) else part
                for title, part in item.items()
            }
        else:
            yield item


def _all_pages() -> list[str]:
    own = [str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")]
    return sorted([*own, *PAGES.values(), *map(_reference, ROOMS)])


# The reference


def _reference(room: str) -> str:
    return f"reference/{room}.md"


def _reference_page(room: str) -> str:
    about = inspect.getdoc(importlib.import_module(f"metagrad.{room}"))
    names = "\n\n".join(f"::: metagrad.{room}.{name}" for name in sorted(public(room), key=str.lower))
    return f"# metagrad.{room}\n\n{about}\n\n{names}\n"


def _names() -> str:
    """Return the page of all public names, by room."""
    package = set(metagrad.__all__)
    parts = ["# All public names", "Names in bold are in `metagrad` itself: `mg.MAML`."]
    for room in ROOMS:
        links = [_linked(room, name, name in package) for name in sorted(public(room), key=str.lower)]
        parts += [f"## [metagrad.{room}]({room}.md)", " &middot; ".join(links)]
    return "\n\n".join(parts) + "\n"


def _linked(room: str, name: str, is_in_package: bool) -> str:
    link = f"[`{name}`][metagrad.{room}.{name}]"
    return f"**{link}**" if is_in_package else link


class Runtime(griffe.Extension):
    """Docstrings and signatures that are made when the library is imported, as those of optimizers are."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Name the sections of examples as griffe knows them."""
        if obj.docstring is not None:
            obj.docstring.value = _sections(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let the public names be what they are at run time."""
        for room in ROOMS:
            for name, value in public(room).items():
                if inspect.isclass(value) and value.__module__.startswith("metagrad."):
                    _follow(pkg, f"{room}.{name}", value)


def _follow(package: griffe.Module, path: str, value: type) -> None:
    home = f"{value.__module__}.{value.__qualname__}".removeprefix("metagrad.")
    known = package[home]
    if package[path].is_attribute:  # another name of the class, as rules.lion is of LionRule
        package[path.rpartition(".")[0]].set_member(
            known_as := path.rpartition(".")[2], griffe.Alias(known_as, known)
        )
    if known.docstring is not None:
        known.docstring.value = _sections(inspect.getdoc(value) or "")
    if not _is_protocol(value) and list(_parameters(value)) != [
        p.name for p in known.parameters if p.name != "self"
    ]:
        known.set_member("__init__", griffe.Function("__init__", parameters=_written(value)))


def _is_protocol(value: type) -> bool:
    return getattr(value, "_is_protocol", False)


def _sections(docstring: str) -> str:
    return re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE)


def _parameters(value: type) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(value).parameters)
    except ValueError:  # a protocol, or an enumeration
        return {}


def _written(value: type) -> griffe.Parameters:
    parameters = [
        griffe.Parameter(
            p.name,
            kind=griffe.ParameterKind(p.kind.description),
            annotation=None if p.annotation is p.empty else _annotation(p.annotation),
            default=None if p.default is p.empty else re.sub(r"^<factory>$", "...", repr(p.default)),
        )
        for p in _parameters(value).values()
    ]
    return griffe.Parameters(
        griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword), *parameters
    )


def _annotation(value: Any) -> str:
    return getattr(value, "__forward_arg__", str(value))


# Markdown


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
        ElementTree.SubElement(parent, "p").text = self.parser.md.htmlStash.store(_equation(aligned, "block"))


def _equation(formula: str, display: str) -> str:
    """Return a formula as MathML; refuse what cannot be said in it."""
    math = convert(formula.replace(r"\arg", r"\operatorname{arg}"), display=display)
    if left := re.findall(r"\\[a-zA-Z]+|<mi>&</mi>", math):
        raise ValueError(f"{formula}: no MathML for {left}. Write it in other terms.")
    return math


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
