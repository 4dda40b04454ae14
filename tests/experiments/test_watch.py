import fcntl
import json
import math
import os

import pytest

from experiments import watch
from experiments.watch import look, runs_below, sparkline, table


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a run that has begun: a validation every tenth of 40 iterations."""
    run = tmp_path / "sweep" / "0"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text("iterations: 40\n")
    rows = [{"step": 0, "validation/loss_before": 9.0, "validation/loss_ci95": 1.0, "validation/loss": 4.0}]
    rows += [{"step": step, "train/loss": 1.0, "validation/loss": 40.0 / step} for step in (10, 20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "costs.jsonl").write_text('{"step": 20, "time/outer_step(ms)": 3000.0}\n')
    return tmp_path / "sweep"


def test_a_run_that_runs_has_a_time_left_and_the_curve_of_its_validation(folder):
    descriptor = os.open(folder / "0", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        run = look(folder / "0", folder, "")
    finally:
        os.close(descriptor)
    assert (run.state, run.step, run.iterations, run.seconds_left) == ("running", 20, 40, 60.0)
    assert (run.metric, run.curve) == ("validation/loss", ([0, 10, 20], [4.0, 4.0, 2.0]))
    assert table([run]) == "0  running  20 / 40  01:00 left  validation/loss 2  ██▁"


@pytest.mark.parametrize(
    ("file", "words", "state"),
    [
        ("result.json", "{}", "finished"),
        ("failure.txt", "Out of memory: a\nlot\n", "Out of memory: a"),
        ("memory.txt", "", "stopped"),
    ],
)
def test_a_run_that_does_not_run_says_why(folder, file, words, state):
    (folder / "0" / file).write_text(words)
    run = look(folder / "0", folder, "train/loss")
    assert (run.state, run.seconds_left, run.curve) == (state, None, ([10, 20], [1.0, 1.0]))


def test_more_values_than_fit_are_averaged_and_what_is_not_finite_is_marked():
    assert sparkline([float(i // 2) for i in range(16)], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 2.0, math.inf]) == "▁?█?"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""


def test_the_program_looks_once(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["watch", str(folder), "--once"])
    watch.main()
    assert "validation/loss 2" in capsys.readouterr().out


def test_what_cannot_be_watched_is_a_sentence(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"watch: .*empty has no run in it or .* a metrics.jsonl"):
        runs_below(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"no run below .*sweep has the metric accuracy"):
        watch.watch(folder, "accuracy", 1.0, once=True)
