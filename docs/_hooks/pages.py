"""Adds pages from outside of docs/ and the API reference to MkDocs."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs._hooks.addresses import PLACEHOLDER, address
from docs._hooks.docstrings import Docstrings
from docs._hooks.families import FAMILIES
from docs._hooks.reference import PACKAGES, names_page, package_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    "experiments/README.md": "experiments.md",
    "docs/decisions": "decisions/index.md",
    **{
        str(path.relative_to(ROOT)): f"internals/{path.parent.name}.md"
        for path in ROOT.glob("metagrad/*/README.md")
    },
}
"""Pages outside of docs/, by their paths in the repository."""

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Expand the patterns of the navigation, set the addresses, and add the syntax of docstrings to Markdown."""
    if PLACEHOLDER not in address("Documentation"):
        config.site_url, config.repo_url = address("Documentation"), address("Repository")
    config.nav = list(_expanded(config.nav))
    config.markdown_extensions.append(Docstrings())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside of docs/ and the reference."""
    for source, page in PAGES.items():
        text = _index_of(source) if (ROOT / source).is_dir() else (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/index.md", content=names_page()))
    for package in PACKAGES:
        files.append(File.generated(config, _reference(package), content=package_page(package)))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Replace links to files of the repository by links to pages of the site."""
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
    """Return the page of the site for a file of the repository."""
    return "index.md" if path == "README.md" else PAGES.get(path, path.removeprefix("docs/"))


def _sources() -> dict[str, str]:
    return {page: source for source, page in PAGES.items()}


def _index_of(folder: str) -> str:
    """Return a page that lists the pages of a folder by their titles."""
    pages = sorted((ROOT / folder).glob("*.md"))
    titles = [page.read_text().partition("\n")[0].lstrip("# ") for page in pages]
    lines = [f"- [{title}]({page.stem}.md)" for title, page in zip(titles, pages, strict=True)]
    return "\n".join([f"# {Path(folder).name.capitalize()}", "", *lines, ""])


def _expanded(items: list[Any]) -> Iterator[Any]:
    """Yield the items of a navigation, with patterns replaced by the matching pages."""
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
    methods = [family.page(method) for family in FAMILIES for method in family.methods()]
    return sorted([*own, *methods, *PAGES.values(), *map(_reference, PACKAGES)])


def _reference(package: str) -> str:
    return f"reference/{package}.md"
