"""Every program at its small setting, on one page: `python -m experiments.gallery [only=[train,attack]] [jobs=2]`.

`conf/gallery.yaml` lists the programs. Each program runs in its own process and writes into `FOLDER/NAME`. A
program that has succeeded is not run again. `FOLDER/index.html` shows the pictures and tables of each program, its
command, its time, and the whole message if it failed.
"""

from __future__ import annotations

import html
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import hydra
import markdown
from hydra.core.config_store import ConfigStore

from experiments.run import result
from experiments.run.config import check_least, converted
from experiments.run.files import command_of, data_file, write_text
from experiments.run.job import launch
from experiments.run.progress import Progress, tell
from experiments.run.schema import key
from experiments.run.signals import signals_raised
from metagrad.tasks.omniglot.files import find_files
from metagrad.tasks.omniglot.splits import SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

RECORD = "gallery.json"
SHORT = 40  # lines of a page that is shown unfolded
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --muted: light-dark(#666, #aaa); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; }
nav a { display: inline-block; margin: 0 1rem .3rem 0; }
pre, code { font: 13px/1.4 ui-monospace, monospace; }
pre, .table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; margin: 1rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left; }
summary { cursor: pointer; }
img { max-width: 100%; max-height: 30rem; background: #fff; border-radius: 4px; margin: .5rem 0; }
.muted { color: var(--muted); }
.failed { color: #c33; }
h3 { font-size: 1.05rem; }
"""


@dataclass
class Program:
    """A program of the gallery."""

    title: str = key("The title on the page.")
    run: list[str] = key("The module and its arguments.")
    data: str | None = key("The data that the program needs: omniglot, or a path below METAGRAD_DATA.", None)


@dataclass
class Gallery:
    """The programs to run and to show."""

    folder: str = key("Where the page and the folders of the programs are.")
    jobs: int = key("Programs that run at once.")
    only: list[str] = key("The programs to run; empty is all of them.")
    programs: dict[str, Program] = field(
        default_factory=dict, metadata={"help": "Title, command and data, by name."}
    )


class Shown(NamedTuple):
    """The outcome of a program.

    Attributes:
        command: The command line.
        seconds: Running time in seconds.
        failure: The message of a program that failed, empty otherwise.
    """

    command: str
    seconds: float
    failure: str


ConfigStore.instance().store(name="gallery_schema", node=Gallery)


def main() -> None:
    """Run the program."""
    launch(program, "gallery", "experiments.gallery")


@hydra.main(config_path="../conf", config_name="gallery", version_base="1.3")
def program(config: DictConfig) -> None:
    """Run the programs that are missing, and write the page."""
    make(converted("gallery", config))


def make(config: Gallery) -> Path:
    """Run a few programs at a time, and write the page after each of them.

    Raises:
        ValueError: A name is unknown, data are missing, or a program failed. The page is written in the last case.
    """
    check_least("gallery", {"jobs": (config.jobs, 1)})
    if unknown := [name for name in config.only if name not in config.programs]:
        raise ValueError(
            f"gallery: there is no program {unknown[0]}; there are {', '.join(config.programs)}."
        )
    chosen = {name: one for name, one in config.programs.items() if not config.only or name in config.only}
    _check_data(chosen)
    folder, shown, children = Path(config.folder), {}, set()
    with (
        signals_raised(),
        ThreadPoolExecutor(config.jobs) as pool,
        _ended(children, pool),
        Progress(total=len(chosen), unit="program") as bar,
    ):
        jobs = {pool.submit(run, one, folder / name, children): name for name, one in chosen.items()}
        for job in as_completed(jobs):
            name = jobs[job]
            shown[name] = job.result()
            tell(f"{name}: {shown[name].failure or f'{shown[name].seconds:.0f} s'}")
            bar.update()
            in_order = {name: shown[name] for name in chosen if name in shown}
            write_text(folder / "index.html", page(config, in_order))
    print(folder / "index.html")
    if failed := [name for name, one in shown.items() if one.failure]:
        raise ValueError(f"gallery: {', '.join(failed)} failed; the page says why.")
    return folder / "index.html"


def _check_data(programs: dict[str, Program]) -> None:
    """Raise one error that names all missing data and the programs that can run without them."""
    missing = {}
    for data in dict.fromkeys(one.data for one in programs.values() if one.data):
        try:
            find_files(None, SPLITS["train"], download=False) if data == "omniglot" else data_file(data)
        except (OSError, ValueError) as error:  # noqa: PERF203
            missing[data] = str(error)
    if missing:
        others = ",".join(name for name, one in programs.items() if one.data not in missing)
        first = f"gallery: {', '.join(missing)} missing; run the other programs by only=[{others}]."
        raise ValueError("\n".join([first, *missing.values()]))


@contextmanager
def _ended(children: set[subprocess.Popen[bytes]], pool: ThreadPoolExecutor) -> Iterator[None]:
    """End all child processes if an error or a signal leaves the context."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        raise


def run(one: Program, folder: Path, children: set[subprocess.Popen[bytes]]) -> Shown:
    """Run a program unless it has succeeded before, and return the outcome. A failed run starts again."""
    record, command = folder / RECORD, f"{command_of(one.run[0])} {shlex.join(one.run[1:])}".rstrip()
    if record.exists():
        before = Shown(**json.loads(record.read_text()))
        if not before.failure and before.command == command:
            return before
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(record, json.dumps(Shown(command, 0.0, "It has not ended.")._asdict()) + "\n")
    began = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **os.environ}
    with (
        (folder / "gallery.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", *one.run], stdout=log, stderr=log, env=environment, start_new_session=True
        ) as child,
    ):
        children.add(child)
        status = child.wait()
    children.discard(child)
    failure = _failure(folder) if status else ""
    shown = Shown(command, time.perf_counter() - began, failure)
    write_text(record, json.dumps(shown._asdict()) + "\n")
    return shown


def _failure(folder: Path) -> str:
    """Return the whole message of a failed program, or the end of its output if there is no message."""
    if (folder / result.FAILURE).exists():
        return (folder / result.FAILURE).read_text().strip()
    lines = (folder / "gallery.log").read_text(errors="replace").splitlines()
    return "\n".join(lines[-20:]) or "The program printed nothing."


def page(config: Gallery, shown: dict[str, Shown]) -> str:
    """Return the page that shows the outcomes."""
    folder = Path(config.folder)
    links = "".join(f'<a href="#{name}">{html.escape(config.programs[name].title)}</a>' for name in shown)
    sections = [_section(config.programs[name].title, name, one, folder) for name, one in shown.items()]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>metagrad: gallery</title><style>{STYLE}</style></head><body>"
        "<h1>What higher-order gradients are for</h1><p>Every program of <code>experiments</code> at its small "
        "setting: a look at what it makes, not results. The pages in <code>docs/</code> have those.</p>"
        f"<nav>{links}</nav>{''.join(sections)}</body></html>\n"
    )


def _section(title: str, name: str, one: Shown, folder: Path) -> str:
    own = folder / name
    pictures = sorted([*own.glob("*.png"), *own.glob("plots/*.png")])
    parts = [f'<section id="{name}"><h2>{html.escape(title)}</h2><pre>{html.escape(one.command)}</pre>']
    parts.append(f'<p class="muted">{one.seconds:.0f} seconds</p>')
    if one.failure:
        parts.append(f'<pre class="failed">{html.escape(one.failure)}</pre>')
    parts += [
        f'<a href="{file}"><img src="{file}" alt="{file.stem}" loading="lazy"></a>'
        for file in (path.relative_to(folder) for path in pictures)
    ]
    parts += [_table(path.read_text()) for path in sorted(own.glob("*.md"))]
    parts += [f"<pre>{html.escape(path.read_text())}</pre>" for path in sorted(own.glob("memory.txt"))]
    return "".join([*parts, "</section>"])


def _table(text: str) -> str:
    """Return a page in Markdown as HTML, its headings two levels lower, folded if it is long."""
    lowered = "\n".join(f"##{line}" if line.startswith("#") else line for line in text.splitlines())
    made = markdown.markdown(lowered, extensions=["tables", "fenced_code", "sane_lists"])
    is_open = " open" if len(text.splitlines()) <= SHORT else ""
    made = made.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    return f"<details{is_open}><summary>Tables</summary>{made}</details>"


if __name__ == "__main__":
    main()
