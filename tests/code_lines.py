"""Count lines of code: lines with a token that is neither a comment nor a docstring. Prints folders and the total.

python tests/code_lines.py [folder ...]
"""

import ast
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def docstring_lines(source):
    """Return the numbers of the lines that hold docstrings."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def code_lines(path):
    """Return the number of lines of code of one Python file."""
    source = path.read_text()
    lines = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in SILENT:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def python_files(folder):
    """Return the Python files below a folder of the project, sorted."""
    return sorted((ROOT / folder).rglob("*.py"))


def total(folder):
    """Return the lines of code of all Python files below a folder of the project."""
    return sum(map(code_lines, python_files(folder)))


def table(folder):
    """Return a table of the lines and files of each folder directly below a folder, and their total."""
    rows = {}
    for path in python_files(folder):
        below = path.relative_to(ROOT / folder).parts
        name = below[0] if len(below) > 1 else "."
        lines, files = rows.get(name, (0, 0))
        rows[name] = (lines + code_lines(path), files + 1)
    rows["total"] = (sum(row[0] for row in rows.values()), sum(row[1] for row in rows.values()))
    body = [
        f"  {name:24}{lines:8,}{files:6}"
        for name, (lines, files) in sorted(rows.items(), key=lambda r: r[1][0])
    ]
    return "\n".join([f"{folder}/{'':24}{'lines':>6}{'files':>6}"[:60], *body])


if __name__ == "__main__":
    for folder in sys.argv[1:] or ("metagrad", "experiments", "tests"):
        print(table(folder))
