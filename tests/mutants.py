"""Plant bugs in metagrad one at a time, and see which of them the tests find.

    python tests/mutants.py record            # runs the tests under coverage: which test executes which line
    python tests/mutants.py run

A bug changes one operator, constant or condition in a line that a test executes. The same seed plants the same bugs.
Each bug is planted in a copy of the working tree. The tests that execute its line run there, fastest first. The bug
is found if one of them fails within ``--limit`` CPU seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
}
BOOLEAN = {ast.And: "or", ast.Or: "and"}


class Mutant(NamedTuple):
    """A replacement of the bytes from start to end of a file."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self):
        return f"{self.path}:{self.line} {self.old.strip()!r} -> {self.new.strip()!r}"


class Source:
    """A file as bytes, with the offset of each line."""

    def __init__(self, path: str):
        self.path = path
        self.bytes = (ROOT / path).read_bytes()
        self.lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def start(self, node: ast.expr) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def replaced(self, node: ast.expr, new: str) -> Mutant:
        return self.mutant(self.start(node), self.end(node), new)

    def operator(self, left: ast.expr, right: ast.expr, new: str) -> Mutant:
        """Return a mutant that replaces the operator between two operands."""
        start, end = self.end(left), self.start(right)
        between = self.bytes[start:end].decode()
        text = between.replace(")", " ").replace("(", " ").strip()
        start += between.index(text)
        return self.mutant(start, start + len(text), new)

    def mutant(self, start: int, end: int, new: str) -> Mutant:
        line = self.bytes.count(b"\n", 0, start) + 1
        return Mutant(self.path, line, start, end, self.bytes[start:end].decode(), new)


def mutants_of(source: Source) -> Iterator[Mutant]:
    """Yield every change of one operator, constant or condition, except in annotations and messages."""
    for node in expressions(ast.parse(source.bytes)):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield source.operator(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            yield source.operator(node.left, node.right, ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            yield source.operator(node.values[0], node.values[1], BOOLEAN[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield source.mutant(source.start(node), source.start(node.operand), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield source.replaced(node, str(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            doubled = isinstance(node.value, float) and node.value
            yield source.replaced(node, str(2 * node.value if doubled else node.value + 1))


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree without annotations, ``raise`` statements and formatted strings."""
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from expressions(child)


class Recorded:
    """The lines that each passing test executes, and its CPU seconds."""

    def __init__(self, folder: Path):
        self.seconds = json.loads((folder / "seconds.json").read_text())
        self.database = sqlite3.connect(folder / "coverage")
        self.contexts = dict(self.database.execute("select id, context from context"))
        self.lines: dict[str, dict[int, set[str]]] = {}

    def tests(self, path: str, line: int) -> set[str]:
        if path not in self.lines:
            self.lines[path] = self._of_file(path)
        return self.lines[path].get(line, set())

    def _of_file(self, path: str) -> dict[int, set[str]]:
        rows = self.database.execute(
            "select context_id, numbits from line_bits join file on file.id = file_id where path like ?",
            ("%/" + path,),
        )
        found: dict[int, set[str]] = {}
        for context, bits in rows:
            test = self.contexts[context].rpartition("|")[0]
            if test not in self.seconds:
                continue
            for line in (8 * i + k for i, byte in enumerate(bits) for k in range(8) if byte >> k & 1):
                found.setdefault(line, set()).add(test)
        return found


def sample(recorded: Recorded, count: int, seed: int) -> list[Mutant]:
    """Draw bugs among all in lines that a test executes."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "metagrad").rglob("*.py"))
    everything = [m for path in files for m in mutants_of(Source(path)) if recorded.tests(path, m.line)]
    return random.Random(seed).sample(everything, count)


class Selection:
    """A pytest plugin that runs given tests in order within a CPU time limit, and records the failures."""

    def __init__(self, order: list[str], limit: float):
        self.rank = {test: k for k, test in enumerate(order)}
        self.limit = limit
        self.failed: list[str] = []
        self.run = 0

    def pytest_collection_modifyitems(self, config, items):
        items[:] = sorted((i for i in items if i.nodeid in self.rank), key=lambda i: self.rank[i.nodeid])

    def pytest_collection_finish(self, session):
        self.started = processor_time()

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report):
        self.run += report.when == "call"
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_teardown(self, item, nextitem):
        if processor_time() - self.started > self.limit:
            item.session.shouldstop = "the processor time is over"


def processor_time() -> float:
    """Return the CPU seconds of this process and its child processes."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def hunt(mutant: Mutant, tests: list[str], copy: Path, options: argparse.Namespace) -> dict:
    """Plant a bug in the copy, run the tests in a child process, and return the failures."""
    target = copy / mutant.path
    original = target.read_bytes()
    target.write_bytes(original[: mutant.start] + mutant.new.encode() + original[mutant.end :])
    reader, writer = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                run_in_child(tests, copy, writer, options)
            finally:
                os._exit(0)
        os.close(writer)
        return {"mutant": str(mutant), **result_of(child, reader, 10 * options.limit)}
    finally:
        target.write_bytes(original)


def run_in_child(tests: list[str], copy: Path, writer: int, options: argparse.Namespace) -> None:
    import pytest

    os.setsid()
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    selection = Selection(tests, options.limit)
    files = sorted({t.partition("::")[0] for t in tests})
    plain = ["-q", "--assert=plain", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no"]
    code = pytest.main([*plain, f"--maxfail={options.maxfail}", *files], plugins=[selection])
    with os.fdopen(writer, "w") as pipe:
        json.dump({"found": selection.failed or code not in (0, 1, 2), "run": selection.run}, pipe)


def result_of(child: int, reader: int, seconds: float) -> dict:
    """Wait for the child process. The bug counts as found if the process hangs or dies."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.05)
    if time.monotonic() >= end:
        os.killpg(child, 9)
        os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return json.loads(text) if text else {"found": ["hangs or dies"], "run": 0}


def record(folder: Path) -> None:
    """Run the tests under coverage, in one process."""
    import pytest

    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    os.environ["COVERAGE_FILE"] = str(folder / "coverage")
    seconds: dict[str, float] = {}

    failed = set()

    class Clock:
        def pytest_runtest_logreport(self, report):
            seconds[report.nodeid] = seconds.get(report.nodeid, 0) + report.duration
            failed.update({report.nodeid} if report.failed else ())

    options = [
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:xdist",
        "--cov=metagrad",
        "--cov-context=test",
        "--cov-report=",
    ]
    code = pytest.main(options, plugins=[Clock()])
    passed = {test: time for test, time in seconds.items() if test not in failed}
    (folder / "seconds.json").write_text(json.dumps(passed))
    sys.exit(code)


def run(folder: Path, options: argparse.Namespace) -> None:
    """Print each bug, the tests that find it, and the share of bugs that are found."""
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "tests")]
    import hydra  # noqa: F401
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import scipy.sparse.linalg  # noqa: F401
    import torch._dynamo  # noqa: F401

    recorded = Recorded(folder)
    mutants = sample(recorded, options.count, options.seed)
    copy = copied(options.tree, options.copy)
    sys.dont_write_bytecode = True  # byte code of a planted bug must not be reused
    part, _, parts = options.part.partition("/")
    results = []
    for number, mutant in list(enumerate(mutants))[options.start + int(part) :: int(parts)]:
        tests = sorted(
            recorded.tests(mutant.path, mutant.line), key=lambda t: (recorded.seconds.get(t, 0.0), t)
        )
        found = hunt(mutant, tests, copy, options)
        results.append({"number": number, **found, "of": len(tests)})
        print(json.dumps(results[-1]), flush=True)
    print(f"{sum(bool(r['found']) for r in results)} of {len(results)} found")


def copied(tree: Path, copy: Path) -> Path:
    """Copy a working tree, with the byte code of its tests."""
    if copy.exists():
        shutil.rmtree(copy)
    ignored = shutil.ignore_patterns(".git", ".venv", "outputs", "multirun", "__pycache__", ".hypothesis")
    shutil.copytree(tree, copy, ignore=ignored)
    (copy / ".venv").symlink_to((tree / ".venv").resolve())
    subprocess.run(
        [sys.executable, "-m", "pytest", "--assert=plain", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=copy,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["record", "run"])
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "mutants")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the working tree to copy")
    parser.add_argument("--copy", type=Path, default=Path("/tmp/metagrad-mutants"))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60, help="seconds of processor time for a bug")
    parser.add_argument("--maxfail", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="leave out the bugs before this one")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th bug from the K-th on")
    options = parser.parse_args()
    if options.what == "record":
        record(options.folder)
    else:
        run(options.folder, options)


if __name__ == "__main__":
    main()
