import itertools
import sys

import pytest

from experiments.run import progress
from experiments.run.progress import Progress, tell


@pytest.fixture
def clock(monkeypatch):
    """Make the clock of the lines tell the seconds that a test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def units(clock, seconds: float, **arguments) -> None:
    with Progress(total=3, unit="cell", **arguments) as bar:
        for name in "abc":
            clock[0] += seconds
            bar.set_postfix_str(name)
            bar.update()


def test_without_a_terminal_are_lines_with_the_time_left_and_none_in_standard_output(clock, capsys):
    units(clock, 40.0)
    out, err = capsys.readouterr()
    assert not out
    first, *others, last = err.splitlines()
    assert first.startswith("0 of 3 cells, 0 %, 00:00 taken, ")
    assert first.endswith(" left, a")
    assert last.startswith("3 of 3 cells, 100 %, ")
    assert len(others) == 2
    assert "\r" not in err


def test_lines_are_as_far_apart_as_they_should_be(clock, capsys):
    units(clock, 8.0)  # at 8, 16 and 24 seconds, which prints one line, and then the last line
    assert [line[0] for line in capsys.readouterr().err.splitlines()] == ["0", "3"]


def test_work_within_work_has_lines_of_its_own(clock, capsys):
    for _ in Progress(range(2), unit="step"):
        units(clock, 40.0, leave=False)
    lines = capsys.readouterr().err.splitlines()
    assert sum("cells" in line for line in lines) == 6
    assert lines[-1].startswith("2 of 2 steps, 100 %")
    assert not [line for line in lines if not line.startswith(("0 ", "1 ", "2 ", "3 "))]


@pytest.mark.parametrize(("seconds", "arguments"), [(1.0, {}), (40.0, {"hidden": True})])
def test_what_is_short_or_hidden_says_nothing(clock, capsys, seconds, arguments):
    units(clock, seconds, **arguments)
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_is_a_bar_and_a_table_stays_apart(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for number in Progress(itertools.islice(itertools.count(), 2), total=2, unit="cell"):
        tell(f"row {number}")
    out, err = capsys.readouterr()
    assert out.replace("\r", "").split("\n")[0].strip() == "row 0"
    assert "2/2" in err
