"""Where a run comes from: code, versions, platform, environment, command line, seed, time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from experiments.run.files import write_text
from metagrad import info

FILE = "provenance.json"


def write(folder: Path, *, seed: int, processes: int = 1, resumed: dict[str, Any] | None = None) -> None:
    """Write `provenance.json`. A resumed run appends its record to the file of the original run."""
    path = folder / FILE
    record = start(seed, processes)
    if resumed is not None:
        origin = json.loads(path.read_text()) if path.exists() else dict(record)
        origin.setdefault("resumed", []).append({**resumed, **record})
        record = origin
    write_text(path, json.dumps(record, indent=2) + "\n")


def start(seed: int, processes: int = 1) -> dict[str, Any]:
    """Return the record of a run of several processes when it starts."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "seed": seed,
        "processes": processes,
        "git": git(Path(__file__).parent),
        **asdict(info.collect()),
    }


def git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout around a folder and whether it has changes. None without git."""
    commit, changes = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain")
    return None if commit is None or changes is None else {"commit": commit, "dirty": changes != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
