"""What the README shows can be pasted: its programs run, in order, in one session."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def test_the_programs_of_the_readme_run(capsys):
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(programs) >= 3
    torch.manual_seed(0)
    session: dict[str, object] = {}
    for program in programs:
        exec(compile(program, "README.md", "exec"), session)
    assert "Each inner step adds" in capsys.readouterr().out


def test_the_pictures_and_commands_of_the_readme_exist():
    root = Path(__file__).resolve().parents[1]
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (root / path).is_file(), path
    for module in re.findall(r"python -m (experiments(?:\.\w+)+)", README):
        place = root.joinpath(*module.split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    for experiment in re.findall(r"experiment=(\w+)", README):
        assert (root / "conf" / "experiment" / f"{experiment}.yaml").is_file(), experiment
