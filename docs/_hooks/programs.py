"""Runs the programs of a page in order, and collects their output and figures.

Blocks of ``python`` share one namespace. Blocks of ``sh`` run in a shell, except for installation commands. All
blocks run in one folder. The pictures of a block are its open matplotlib figures and the files ``*.png`` whose paths
it prints.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RUN = [ROOT / "docs/quickstart.md", *sorted(ROOT.glob("docs/tutorials/*.md"))]
"""Pages that show the output and figures of their programs."""
PROGRAM = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Program(NamedTuple):
    """A block of code of a page."""

    language: str
    text: str
    line: int


class Shown(NamedTuple):
    """The output of a program, and its pictures as pairs of title and PNG in base 64."""

    printed: str
    pictures: list[tuple[str, str]]


def programs(text: str) -> list[Program]:
    """Return the programs of a page in order."""
    return [Program(m[1], m[2], text.count("\n", 0, m.start(2))) for m in PROGRAM.finditer(text)]


def run(text: str, name: str, folder: Path) -> list[Shown]:
    """Run the programs of a page in a folder. Errors refer to lines of the page."""
    os.environ.setdefault("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with _inside(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")  # plt.show()
        return [_run(program, name, namespace) for program in programs(text)]


def _run(program: Program, name: str, namespace: dict[str, Any]) -> Shown:
    if program.language == "sh":
        printed = "" if "pip install" in program.text else _commands(program)
        return Shown(printed, _files(printed))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * program.line + program.text, name, "exec"), namespace)
    return Shown(out.getvalue(), _figures())


def _commands(program: Program) -> str:
    """Run shell commands with this Python first in the path, and return their output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", program.text],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"line {program.line}: {program.text}\n{done.stdout}{done.stderr}")
    return done.stdout


def _figures() -> list[tuple[str, str]]:
    """Return the open matplotlib figures and close them."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    pictures = [(_title(figure), _png(figure)) for figure in figures]
    pyplot.close("all")
    return pictures


def _title(figure: Any) -> str:
    titles = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center")]
    return next(filter(None, [figure.get_suptitle(), *titles]), "Figure")


def _png(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=144, bbox_inches="tight")
    return base64.b64encode(file.getvalue()).decode()


def _files(printed: str) -> list[tuple[str, str]]:
    """Return the pictures whose paths were printed."""
    paths = [Path(word) for word in printed.split() if word.endswith(".png")]
    return [(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in paths if path.is_file()]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
