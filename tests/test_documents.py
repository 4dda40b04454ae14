"""Programs of documents run, their links, commands and options exist, and documents stay short."""

from __future__ import annotations

import base64
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import metagrad
from docs._hooks import notebooks
from docs._hooks.programs import RUN, run
from docs._hooks.programs import programs as programs_and_commands
from experiments.benchmarks import curvature as bench_curvature
from experiments.benchmarks import sparse as bench_sparse
from experiments.benchmarks.maml import workloads
from experiments.run.config import SCHEMAS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("*.md", ".github/*.md", "docs/**/*.md", "experiments/**/*.md", "metagrad/**/*.md")
DOCUMENTS = sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern))
LONGEST = {"README.md": 150, "metagrad/**/README.md": 60, "docs/decisions/*.md": 15}  # lines
NAMES = re.compile(
    r"(?<![\w./])(?:mg|metagrad|rules|curvature|hypergrad|sparse)(?:\.(?!(?:md|py|plots)\b)[A-Za-z_]\w*)+"
)
ROOMS = {"mg": "metagrad", "metagrad": "metagrad", "rules": "metagrad.optim.rules"}
OPTIONS = re.compile(r"\b(algorithm/inner|experiment|optimizer|workload|preset|algorithm)=([\w,]+)")

WORKLOADS = {
    "maml": workloads.WORKLOADS,
    "curvature": bench_curvature.WORKLOADS,
    "sparse": bench_sparse.OPERATIONS,
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def programs(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


WITH_PROGRAMS = [path for path in DOCUMENTS if programs(path)]


@pytest.mark.parametrize("path", [path for path in WITH_PROGRAMS if path not in RUN], ids=name)
def test_programs_of_documents_run(path, capsys):
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    for program in programs(path):
        # Ten outer steps show that the first program of the README runs. Its 1,000 steps take ten seconds.
        exec(compile(program.replace("range(1000)", "range(10)"), name(path), "exec"), namespace)
    if name(path) == "docs/memory.md":
        assert "inner steps:" in capsys.readouterr().out


@pytest.mark.slow
def test_the_first_program_of_the_readme_prints_what_the_page_says(capsys):
    path = ROOT / "README.md"
    exec(compile(programs(path)[0], name(path), "exec"), {})
    assert f"`{capsys.readouterr().out.strip()}`" in path.read_text()


MIGRATING = (ROOT / "docs/migrating.md").read_text()
SIDES = re.findall(r"```python title=\"([\w.]+)\"\n(.*?)```\n\n```python\n(.*?)```", MIGRATING, re.DOTALL)


@pytest.mark.parametrize(("library", "there", "here"), SIDES, ids=[library for library, *_ in SIDES])
@pytest.mark.filterwarnings("default")  # of the other library
def test_programs_of_other_libraries_print_what_ours_do(library, there, here, capsys):
    pytest.importorskip(library)
    shared, *_ = programs(ROOT / "docs/migrating.md")
    printed = []
    for program in (there, here):
        exec(compile(shared + program, library, "exec"), {"__name__": "__main__"})
        printed.append(capsys.readouterr().out.split()[-1])
    assert printed[0] == printed[1]


def test_the_libraries_that_people_come_from_have_a_program_each():
    libraries = ["higher", "learn2learn", "torchopt", "betty", "torch.func", "jax"]
    assert [library for library, *_ in SIDES] == libraries


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN, ids=name)
def test_programs_of_tutorials_run(path, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `experiments` is not installed")
    torch.manual_seed(0)
    shown = run(path.read_text(), name(path), tmp_path)
    assert len(shown) == len(programs_and_commands(path.read_text()))


def test_a_page_shows_what_its_programs_print_and_draw(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `experiments` is not installed")
    code = ["pip install something", "x = [1, 2]\nprint(x)", "echo $((40 + 2))"]
    code[2:2] = ["import matplotlib.pyplot as plt\nplt.plot(x)\nplt.title('A line')"]
    kinds = ["sh", "python", "python", "sh"]
    page = "\n\n".join(f"```{kind}\n{text}\n```" for kind, text in zip(kinds, code, strict=True))
    install, first, second, third = run(page, "page.md", tmp_path)
    assert install == ("", [])
    assert first == ("[1, 2]\n", [])
    ((title, picture),) = second.pictures
    assert (second.printed, title) == ("", "A line")
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert third == ("42\n", [])


def test_an_error_of_a_page_has_its_line(tmp_path):
    with pytest.raises(RuntimeError, match="line 1: exit 3"):
        run("```sh\nexit 3\n```\n", "page.md", tmp_path)


@pytest.mark.parametrize("page", notebooks.PAGES)
def test_the_cells_of_a_notebook_are_the_programs_of_its_page(page):
    """The test of the page runs the programs. The first cell installs the requirements."""
    path = ROOT / "docs" / page
    notebook = json.loads(notebooks.notebook(path.read_text(), []))
    install, *cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "%pip install" in install
    assert [cell for cell in cells if not cell.startswith("%%bash")] == [p.strip() for p in programs(path)]
    relative_links = [cell for cell in notebook["cells"] if re.search(r"\]\([^h)]", cell["source"])]
    assert not relative_links


def headings(text: str) -> set[str]:
    """Return the anchors of a document's headings on GitHub."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path, text: str) -> list[str]:
    def is_broken(link: str) -> bool:
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        return not target.exists() or bool(anchor and anchor not in headings(target.read_text()))

    links = re.findall(
        r"\]\(((?!\w+://|(?:algorithms|optimizers|reference)/)[^)\s]+)\)", text
    )  # some are generated
    return [link for link in links if is_broken(link)]


def missing_commands(path: Path, text: str) -> list[str]:
    modules = set(re.findall(r"python -m ((?:experiments|metagrad)(?:\.\w+)+)", text))
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = set(re.findall(r"\bmake ([a-z][\w-]*)`", text))
    files = {m: ROOT.joinpath(*m.split(".")) for m in modules}
    missing = {
        m for m, f in files.items() if not (f.with_suffix(".py").exists() or (f / "__main__.py").exists())
    }
    return [*missing, *(targets - made)]


def missing_files(path: Path, text: str) -> list[str]:
    """Return named files, and named folders next to a README, that do not exist."""
    files = re.findall(r"`((?:metagrad|experiments|tests|conf|docs)/[a-z_./]*)`", text)
    files += re.findall(r"pytest (tests/[\w./]+)", text)
    folders = re.findall(r"`([a-z_]+/)`", text) if path.is_relative_to(ROOT / "metagrad") else []
    return [
        *(file for file in files if not (ROOT / file).exists()),
        *(folder for folder in folders if not (path.parent / folder).is_dir()),
    ]


def missing_names(path: Path, text: str) -> list[str]:
    """Return dotted names that the library does not define."""
    return [name for name in sorted(set(NAMES.findall(text))) if not is_name(name)]


def is_name(name: str) -> bool:
    room, _, rest = name.partition(".")
    try:
        pkgutil.resolve_name(f"{ROOMS.get(room, f'metagrad.{room}')}.{rest}")
    except (AttributeError, ImportError):
        return False
    return True


def missing_workloads(path: Path, text: str) -> list[str]:
    commands = re.findall(r"python -m experiments\.benchmarks\.(\w+)((?: [a-z0-9][\w-]*)*)", text)
    pairs = [(program, name) for program, names in commands for name in names.split()]
    return [name for program, name in pairs if name not in WORKLOADS.get(program, [name])]


def missing_options(path: Path, text: str) -> list[str]:
    commands = re.findall(r"python -m experiments\.(?:train|studies\.\w+)\b[^\n`]*", text)
    chosen = [pair for command in commands for pair in OPTIONS.findall(command)]
    pairs = [(group, option) for group, options in chosen for option in options.split(",")]
    return [f"{group}={option}" for group, option in pairs if not is_option(group, option)]


def is_option(group: str, option: str) -> bool:
    is_file = (ROOT / "conf" / group / f"{option}.yaml").is_file()
    return option == "glob" or is_file or option in SCHEMAS.get(group, {})


@pytest.mark.parametrize(
    "missing",
    [broken_links, missing_commands, missing_files, missing_names, missing_workloads, missing_options],
    ids=lambda f: f.__name__,
)
def test_what_documents_name_exists(missing):
    assert len(DOCUMENTS) > 10
    found = {name(path): missing(path, path.read_text()) for path in DOCUMENTS}
    assert not {document: names for document, names in found.items() if names}


def test_what_does_not_exist_is_found():
    path = ROOT / "README.md"
    assert broken_links(path, "[a](no.md) [a](README.md#no)") == ["no.md", "README.md#no"]
    assert missing_commands(path, "`python -m experiments.no` `make no`") == ["experiments.no", "no"]
    assert missing_files(path, "`docs/no/`") + missing_names(path, "`rules.no(1)`") == [
        "docs/no/",
        "rules.no",
    ]
    text = "`python -m experiments.train experiment=no algorithm/inner=adam,no`"
    assert missing_options(path, text) == ["experiment=no", "algorithm/inner=no"]
    assert missing_workloads(path, "`python -m experiments.benchmarks.maml sinusoid no`") == ["no"]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=name)
def test_a_page_has_its_place_in_the_site(page):
    assert re.search(rf"[ :]{page.name}$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_public_name(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders = ("reference", "algorithms", "optimizers")
    found = "".join(page.read_text() for folder in folders for page in tmp_path.glob(f"{folder}/*.html"))
    rooms = [name for name in metagrad.__all__ if inspect.ismodule(getattr(metagrad, name))]
    anchors = [f"metagrad.{room}.{name}" for room in rooms for name in getattr(metagrad, room).__all__]
    assert not [anchor for anchor in anchors if f'id="{anchor}"' not in found and anchor[-5:] != "rules"]


@pytest.mark.parametrize("pattern", LONGEST)
def test_documents_are_short(pattern):
    for path in ROOT.glob(pattern):
        assert len(path.read_text().splitlines()) <= LONGEST[pattern], name(path)
