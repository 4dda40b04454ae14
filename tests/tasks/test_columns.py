"""One parser for the columns of tables: thirty files, as text, as a mapping and as a data frame."""

from __future__ import annotations

import csv
import datetime
import re

import numpy as np
import pytest
import torch

from metagrad.tasks import Tabular
from metagrad.tasks._columns import read_table

TEXT, INTEGER, FLOAT, DATE = ({"a": kind} for kind in ("text", "integer", "float", "date"))
FILES = {
    "integers": ("a\n1\n-2\n+3\n", "numbers", None, [1, -2, 3]),
    "floats": ("a\n1.5\n.5\n5.\n-1e3\n2E-2\n", "numbers", None, [1.5, 0.5, 5, -1000, 0.02]),
    "dates as numbers": ("a\n1970-01-02\n1970-01-03 12:00\n", "numbers", DATE, [1, 2.5]),
    "dates with seconds": ("a\n1970-01-01T00:00:54\n", "numbers", DATE, [54 / 86400]),
    "dates as ids": ("a\n2024-02-29\n2024-03-01\n", "ids", DATE, ["2024-02-29", "2024-03-01"]),
    "ids": ("a\n1_11\n11_1\n1_0\n", "ids", None, ["1_11", "11_1", "1_0"]),
    "leading zeros": ("a\n007\n7\n", "ids", None, ["007", "7"]),
    "declared integers": ("a\n007\n7\n", "ids", INTEGER, [7, 7]),
    "declared floats": ("a\n1\n1.0\n", "ids", FLOAT, [1.0, 1.0]),
    "blanks around": ("a\n  ann\nbob  \nann\n", "ids", None, ["ann", "bob", "ann"]),
    "quotes": ('a,b\n"x, ""y""",1\n"two\nlines",2\n', "ids", None, ['x, "y"', "two\nlines"]),
    "a mark of the byte order": ("\ufeffa\n1\n", "numbers", None, [1]),
    "blanks around names": (" a , b\n1,2\n", "numbers", None, [1]),
    "blank lines": ("a,b\n\n1,2\n\n3,4\n", "numbers", None, [1, 3]),
    "no newline at the end": ("a\r\n1\r\n2", "numbers", None, [1, 2]),
    "declared text": ("a\nNA\nNone\n1\n", "ids", TEXT, ["NA", "None", "1"]),
    "huge ids": ("a\n99999999999999999999\n", "ids", None, ["99999999999999999999"]),
    "names": ("a\nZoë\n日本\n", "ids", None, ["Zoë", "日本"]),
    "an underscore": ("a\n1\n1_0\n", "numbers", None, "must hold a number in each row, got '1_0' in R1"),
    "digits of another script": (
        "a\n\u0661\n",
        "numbers",
        None,
        "must hold a number in each row, got '\u0661' in R0",
    ),
    "text among numbers": ("a\n1\nx\n", "numbers", None, "got 'x' in R1. For ids pass x={'argument': 'a'}"),
    "an infinite number": (
        "a\n1\n1e999\n",
        "numbers",
        None,
        "must hold a finite number in each row, got '1e999' in R1",
    ),
    "a word for infinity": ("a\ninf\n", "numbers", None, "must hold a number in each row, got 'inf' in R0"),
    "a huge integer": (
        "a\n9223372036854775808\n",
        "ids",
        INTEGER,
        "an integer of 64 bits in each row, got '92233",
    ),
    "a float for an integer": (
        "a\n1\n1.0\n",
        "ids",
        INTEGER,
        "an integer of 64 bits in each row, got '1.0' in R1",
    ),
    "no such day": (
        "a\n2023-02-29\n",
        "ids",
        DATE,
        "a date such as 2024-03-01 in each row, got '2023-02-29' in R0",
    ),
    "an empty field": ("a,b\n,1\n", "ids", None, "has no value in R0, and in 1 of 1 rows. Fill the gaps, or"),
    "a blank field": ("a,b\nx,1\n  ,1\n", "ids", TEXT, "has no value in R1, and in 1 of 2 rows"),
    "words for no value": (
        "a\n1\nNaN\nn/a\nnull\n",
        "numbers",
        None,
        "has no value in R1, and in 3 of 4 rows",
    ),
    "only gaps": ("a,b\n,1\nNone,2\n", "numbers", None, "has no value in R0, and in 2 of 2 rows"),
}


def column(source, use, kinds, missing="raise"):
    table = read_table("Tabular", source)
    table.declare(kinds)
    table.keep_complete([("x", "a")], missing)
    return getattr(table, use)("x", "a").tolist()


def check(source, case, place):
    """Compare a column with its expected values, or its error, in which R0 stands for the first row."""
    _, use, kinds, expected = case
    if isinstance(expected, list):
        assert column(source, use, kinds) == (
            pytest.approx(expected, rel=1e-15) if use == "numbers" else expected
        )
    else:
        message = re.sub(r"R(\d)", lambda match: place(int(match[1])), re.escape(expected))
        with pytest.raises(ValueError, match=f"^Tabular: x='a'.*{message}"):
            column(source, use, kinds)


def lists(content):
    """Return the fields of a file as columns."""
    header, *rows = [fields for fields in csv.reader(content.lstrip("\ufeff").splitlines(True)) if fields]
    return {name.strip(): [row[k] for row in rows] for k, name in enumerate(header)}


@pytest.mark.parametrize("name", FILES)
def test_files_and_mappings_have_the_same_columns(tmp_path, name):
    case, path = FILES[name], tmp_path / "t.csv"
    path.write_bytes(case[0].encode())
    check(path, case, lambda row: rf"line {row + 2} of \S*t\.csv")
    check(lists(case[0]), case, "row {}".format)
    check({name: np.array(values) for name, values in lists(case[0]).items()}, case, "row {}".format)


def test_data_frames_have_the_columns_of_their_file(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for number, case in enumerate(FILES.values()):
        path = tmp_path / f"{number}.csv"
        path.write_bytes(case[0].encode())
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
        check(frame.rename(columns=str.strip), case, "row {}".format)
        if case[1:3] == ("numbers", None) and isinstance(case[3], list):
            check(pandas.read_csv(path).rename(columns=str.strip), case, "row {}".format)


@pytest.mark.parametrize(
    ("entries", "use", "expected"),
    [
        ([1, True, np.int8(3)], "ids", [1, 1, 3]),
        ([1, 2.5, None], "numbers", [1, 2.5]),
        ([3, None, 2], "ids", [3, 2]),
        (np.array([3.0, np.nan]), "ids", [3.0]),
        (torch.tensor([1, 2]), "ids", [1, 2]),
        ([datetime.date(1970, 1, 2), None, datetime.datetime(1970, 1, 1, 12)], "numbers", [1, 0.5]),
        (np.array(["2024-03-01", "NaT"], "M8[ns]"), "ids", ["2024-03-01"]),
        ([1, "1"], "ids", "must hold an integer of 64 bits in each row, got '1' in row 1"),
        (["1", 1], "ids", "must hold text in each row, got 1 in row 1"),
        ([2**70], "ids", "must hold an integer of 64 bits in each row, got 11805"),
        ([1, datetime.date(2024, 1, 1)], "numbers", "got datetime.date(2024, 1, 1) in row 1"),
        ([datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)], "ids", "must hold a date such as 2024-03-01"),
        ([[1], [2]], "ids", "must hold text in each row, got [1] in row 0"),
        ([1.0, np.inf], "numbers", "must hold a finite number in each row, got inf in row 1"),
    ],
    ids=str,
)  # fmt: skip
def test_typed_entries_keep_their_type_and_are_never_mixed(entries, use, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            column({"a": entries}, use, None, "skip")
    else:
        assert column({"a": entries}, use, None, "skip") == expected


def test_rows_with_gaps_are_left_out_when_told_to(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "who,a,kind,y\n1_1,1,cat,1\n11,,cat,2\n1_1,3,,3\n11,4,dog,4\n,5,dog,5\n11,6,cat,6\n1_1,7,dog,\n"
    )
    with pytest.raises(ValueError, match=r"task_column='who' has no value in line 6 of .*missing='skip'"):
        Tabular(path, "who", ["a"], "y", 1, 1)
    tasks = Tabular(path, "who", {"a": ["a"], "kind": "kind"}, "y", 1, 1, on_small="skip", missing="skip")
    assert (tasks.tasks, tasks.skipped, tasks.num_missing) == (["11"], ["1_1"], 4)
    assert tasks.categories == {"kind": ["cat", "dog"]}
