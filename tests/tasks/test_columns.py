"""One parser for the columns of tables: thirty files, as text, as a mapping and as a data frame."""

import csv
import datetime
import re

import numpy as np
import pytest
import torch

from metagrad.tasks import Tabular
from metagrad.tasks._columns import read_table

FILES = [  # content, declared type and use of column a, values or error (R0 is the first row)
    ("a\n1\n-2\n+3\n", "numbers", [1, -2, 3]),
    ("a\n1.5\n.5\n5.\n-1e3\n2E-2\n", "numbers", [1.5, 0.5, 5, -1000, 0.02]),
    ("a\n1970-01-02\n1970-01-03 12:00\n", "date numbers", [1, 2.5]),
    ("a\n1970-01-01T00:00:54\n", "date numbers", [54 / 86400]),
    ("a\n2024-02-29\n2024-03-01\n", "date ids", ["2024-02-29", "2024-03-01"]),
    ("a\n1_11\n11_1\n1_0\n", "ids", ["1_11", "11_1", "1_0"]),
    ("a\n007\n7\n", "ids", ["007", "7"]),
    ("a\n007\n7\n", "integer ids", [7, 7]),
    ("a\n1\n1.0\n", "float ids", [1.0, 1.0]),
    ("a\n  ann\nbob  \nann\n", "ids", ["ann", "bob", "ann"]),
    ('a,b\n"x, ""y""",1\n"two\nlines",2\n', "ids", ['x, "y"', "two\nlines"]),
    ("\ufeffa\n1\n", "numbers", [1]),
    (" a , b\n1,2\n", "numbers", [1]),
    ("a,b\n\n1,2\n\n3,4\n", "numbers", [1, 3]),
    ("a\r\n1\r\n2", "numbers", [1, 2]),
    ("a\nNA\nNone\n1\n", "text ids", ["NA", "None", "1"]),
    ("a\n99999999999999999999\n", "ids", ["99999999999999999999"]),
    ("a\nZoë\n日本\n", "ids", ["Zoë", "日本"]),
    ("a\n1\n1_0\n", "numbers", "must hold a number in each row, got '1_0' in R1"),
    ("a\n\u0661\n", "numbers", "must hold a number in each row, got '\u0661' in R0"),
    ("a\n1\nx\n", "numbers", "got 'x' in R1. For ids pass x={'argument': 'a'}"),
    ("a\n1\n1e999\n", "numbers", "must hold a finite number in each row, got '1e999' in R1"),
    ("a\ninf\n", "numbers", "must hold a number in each row, got 'inf' in R0"),
    ("a\n9223372036854775808\n", "integer ids", "an integer of 64 bits in each row, got '92233"),
    ("a\n1\n1.0\n", "integer ids", "an integer of 64 bits in each row, got '1.0' in R1"),
    ("a\n2023-02-29\n", "date ids", "a date such as 2024-03-01 in each row, got '2023-02-29' in R0"),
    ("a,b\n,1\n", "ids", "has no value in R0, and in 1 of 1 rows. Fill the gaps, or"),
    ("a,b\nx,1\n  ,1\n", "text ids", "has no value in R1, and in 1 of 2 rows"),
    ("a\n1\nNaN\nn/a\nnull\n", "numbers", "has no value in R1, and in 3 of 4 rows"),
    ("a,b\n,1\nNone,2\n", "numbers", "has no value in R0, and in 2 of 2 rows"),
]


def column(source, use, missing="raise"):
    *kind, use = use.split()
    table = read_table("Tabular", source)
    table.declare({"a": kind[0]} if kind else None)
    table.keep_complete([("x", "a")], missing)
    return getattr(table, use)("x", "a").tolist()


def check(source, use, expected, place="row {}".format):
    """Compare a column with its expected values, or its error."""
    if isinstance(expected, list):
        assert column(source, use) == expected
    else:
        message = re.sub(r"R(\d)", lambda match: place(int(match[1])), re.escape(expected))
        with pytest.raises(ValueError, match=f"^Tabular: x='a'.*{message}"):
            column(source, use)


def lists(content):
    """Return the fields of a file as columns."""
    header, *rows = [fields for fields in csv.reader(content.lstrip("\ufeff").splitlines(True)) if fields]
    return {name.strip(): [row[k] for row in rows] for k, name in enumerate(header)}


def test_files_and_mappings_have_the_same_columns(tmp_path):
    path = tmp_path / "t.csv"
    for content, use, expected in FILES:
        path.write_bytes(content.encode())
        check(path, use, expected, lambda row: rf"line {row + 2} of \S*t\.csv")
        check(lists(content), use, expected)
        check({name: np.array(values) for name, values in lists(content).items()}, use, expected)


def test_data_frames_have_the_columns_of_their_file(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    for number, (content, use, expected) in enumerate(FILES):
        path = tmp_path / f"{number}.csv"
        path.write_bytes(content.encode())
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
        check(frame.rename(columns=str.strip), use, expected)
        if use == "numbers" and isinstance(expected, list):
            check(pandas.read_csv(path).rename(columns=str.strip), use, expected)


TYPED = [
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
    (
        [datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)],
        "ids",
        "must hold a date such as 2024-03-01",
    ),
    ([[1], [2]], "ids", "must hold text in each row, got [1] in row 0"),
    ([1.0, np.inf], "numbers", "must hold a finite number in each row, got inf in row 1"),
]


def test_typed_entries_keep_their_type_and_are_never_mixed():
    for entries, use, expected in TYPED:
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=re.escape(expected)):
                column({"a": entries}, use, "skip")
        else:
            assert column({"a": entries}, use, "skip") == expected


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
