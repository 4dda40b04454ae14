"""The project's size: lines of code and files, under bounds that only go down."""

import pytest

from tests.code_lines import code_lines, python_files, total

LINES = {"metagrad": 24_161, "experiments": 10_245, "tests": 28_490}
FILES = {"metagrad": 235, "experiments": 80}


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_does_not_grow(folder):
    assert total(folder) <= LINES[folder]


@pytest.mark.parametrize("folder", FILES)
def test_the_number_of_files_does_not_grow(folder):
    assert len(python_files(folder)) <= FILES[folder]


def test_neither_comments_nor_docstrings_are_lines_of_code(tmp_path):
    lines = ['"""A module."""', "", "import os  # a comment", "# another", "def f(", "    x,", "):"]
    lines += ['    """Two', '    lines."""', "    return x", ""]
    (tmp_path / "module.py").write_text("\n".join(lines))
    assert code_lines(tmp_path / "module.py") == len(["import", "def", "x", "):", "return"])
