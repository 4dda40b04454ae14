"""The programs of docs/integrations.md run with the libraries that they are for."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs/integrations.md").read_text()
PROGRAM = re.compile(r"^```python title=\"([\w, ]+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def require(*libraries: str) -> list[Any]:
    """Import libraries, or skip a test."""
    reason = "{} is not installed, see the extra `integrations`"
    return [pytest.importorskip(library, reason=reason.format(library)) for library in libraries]


@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.filterwarnings("default")  # of the other libraries
def test_the_program_of_a_section_runs(title, tmp_path, monkeypatch):
    ((libraries, program),) = PROGRAM.findall(SECTIONS[title])
    require(*libraries.split(", "))
    monkeypatch.chdir(tmp_path)
    exec(compile(program, title, "exec"), {"__name__": "__main__"})
