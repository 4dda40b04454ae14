from __future__ import annotations

import pytest

from metagrad.memory import Record
from metagrad.memory.report import format_bytes, table


def record(*path, before=0, after=0, peak=0, graph=0, at_peak=0, method="storage"):
    return Record(tuple(path), before, after, peak, graph, at_peak, 0.0125, "cpu", method)


SIZES = {
    None: "-",
    0: "0 B",
    1023: "1023 B",
    -8: "-8 B",
    1024: "1.00 KiB",
    1536: "1.50 KiB",
    -1536: "-1.50 KiB",
    2**20: "1.00 MiB",
    3 * 2**30: "3.00 GiB",
    5 * 2**40: "5120.00 GiB",
}


@pytest.mark.parametrize("nbytes", SIZES)
def test_format_bytes(nbytes):
    assert format_bytes(nbytes) == SIZES[nbytes]


def test_table():
    records = [
        record(("outer", 0), before=0, after=512, peak=3 * 2**20, graph=0, at_peak=8),
        record(
            ("outer", 0), ("inner", 0), before=512, after=2**20, peak=3 * 2**20, graph=2**20, at_peak=2**20
        ),
        record(("outer", 0), ("query", None), before=2**20, after=512, peak=2**20, graph=None, at_peak=None),
    ]
    assert table(records).splitlines() == [
        "phase        before     after      peak  peak delta     graph   at peak  seconds",
        "outer 0         0 B     512 B  3.00 MiB    3.00 MiB       0 B       8 B    0.013",
        "  inner 0     512 B  1.00 MiB  3.00 MiB    3.00 MiB  1.00 MiB  1.00 MiB    0.013",
        "  query    1.00 MiB     512 B  1.00 MiB         0 B         -         -    0.013",
        "cpu, measured by storage: bytes since the tracker was opened",
    ]


def test_a_long_table_says_what_it_leaves_out():
    records = [record(("outer", k)) for k in range(1000)]
    lines = table(records).splitlines()
    assert len(lines) == 1 + 20 + 1 + 40 + 1
    assert lines[20].startswith("outer 19 ")
    assert lines[21] == "... 940 rows not shown (outer 20 to outer 959); table(last=n) shows the last n"
    assert lines[22].startswith("outer 960 ")
    assert lines[61].startswith("outer 999 ")


def test_sixty_rows_are_shown_and_sixty_one_are_not():
    assert "not shown" not in table([record(("outer", k)) for k in range(60)])
    line = table([record(("outer", k)) for k in range(61)]).splitlines()[21]
    assert line == "... 1 row not shown (outer 20); table(last=n) shows the last n"


def test_last_rows():
    records = [record(("outer", k)) for k in range(100)]
    lines = table(records, last=2).splitlines()
    assert lines[1].startswith("... 98 rows not shown (outer 0 to outer 97)")
    assert [line.split()[1] for line in lines[2:4]] == ["98", "99"]
    assert "not shown" not in table(records, last=100)
    assert table(records, last=10**9) == table(records, last=100)


def test_the_footer_says_where_bytes_count_from():
    assert table([record(("a", None), method="allocator")]).endswith(
        "cpu, measured by allocator: bytes in all"
    )


def test_records_are_frozen():
    with pytest.raises(AttributeError, match="cannot assign to field"):
        record(("outer", 0)).before = 1
