"""Run the first program of a document with the installed metagrad: `python tests/first_program.py README.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def main(document: Path) -> None:
    """Run the first Python block of a document."""
    program = re.search(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    if program is None:
        raise SystemExit(f"{document}: expected a block of Python, got none.")
    exec(compile(program[1], str(document), "exec"), {})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
