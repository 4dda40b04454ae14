"""A cache of the output of the programs of a page, until the page or the code changes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import torch

from docs._hooks.programs import ROOT, Shown, run

KEPT = ROOT / ".cache" / "tutorials"
CODE = ["metagrad/**/*.py", "experiments/**/*.py", "conf/**/*.yaml", "docs/_hooks/programs.py"]


def results(path: Path) -> list[Shown]:
    """Return the output of the programs of a page. Run them if the page or the code has changed."""
    kept = KEPT / f"{path.stem}-{_state(path)}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            shown = run(path.read_text(), path.name, Path(folder))
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in KEPT.glob(f"{path.stem}-*.json"):
            old.unlink()
        kept.write_text(json.dumps(shown))
    return [
        Shown(printed, [tuple(p) for p in pictures]) for printed, pictures in json.loads(kept.read_text())
    ]


def _state(path: Path) -> str:
    """Return a digest of the page and of all code that its programs may call."""
    code = [ROOT / file for pattern in CODE for file in sorted(ROOT.glob(pattern))]
    digest = hashlib.sha256(torch.__version__.encode())
    for file in [path, *code]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
