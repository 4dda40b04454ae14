"""Errors are sentences, bugs keep their tracebacks, and a folder belongs to one run."""

import contextlib
import errno
import logging
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from hydra.errors import HydraException

from experiments.run import checkpoint, files, job, outer, resume, signals
from experiments.run.config import composed, typed
from experiments.run.job import RunError, claimed, explained, failures_reported, launch
from experiments.run.signals import Interrupted, signals_deferred, signals_raised
from tests.marks import slow

log = logging.getLogger("test")


def raising(error):
    def program():
        raise error

    return program


FULL = OSError(errno.ENOSPC, "No space left on device", "run/last.pt")
SENTENCES = [
    (ValueError("train: no"), "train: no"),
    (FULL, "No space left on device: run/last.pt"),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), "Permission denied: /x"),
    (HydraException("no such group\n    object_type=Config"), "no such group"),
    (
        ValueError(
            "Caught ValueError in a worker.\nOriginal Traceback (most recent call last):\n  x\nValueError: no image"
        ),
        "ValueError: no image",
    ),
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        "Out of memory: CUDA out of memory. Tried Make meta_batch",
    ),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes"), "Out of memory: "),
    (torch.linalg.LinAlgError("not positive-definite"), "not positive-definite"),
    (
        HydraException("In 'hydra/config': Could not find 'hydra/launcher/joblib'\n\nAvailable options"),
        "hydra/launcher=joblib is a plugin that is not installed: run pip install -e '.[sweep]'.",
    ),
]


@pytest.mark.parametrize(("error", "sentence"), SENTENCES)
def test_what_the_user_can_see_to_is_a_sentence_and_status_1(error, sentence, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    with pytest.raises(SystemExit) as ended:
        launch(raising(error))
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith(sentence)
    assert "Traceback" not in err
    assert "object_type" not in err
    assert "HYDRA_FULL_ERROR" not in os.environ


OVERRIDES = [
    ("algorithm.stps=3", "There is no key algorithm.stps; the keys there are inner, steps, "),
    ("sede=3", "There is no key sede; the keys there are seed, "),
    ("model=nope", "There is no model=nope; the options are context_mlp, conv4, "),
    ("algorithm.steps=nan", "algorithm.steps: Value 'nan' of type 'float' could not be converted to Integer"),
    ("algorithm.steps", "'algorithm.steps' is not a KEY=VALUE that Hydra can read; "),
]


def test_a_value_that_is_missing_is_asked_for():
    with pytest.raises(ValueError, match="has no value") as caught:
        typed(composed("config", ["task=tabular"]))
    assert explained(caught.value) == "train: task.table has no value; give task.table=VALUE."


@pytest.mark.parametrize(("override", "sentence"), OVERRIDES)
def test_an_override_that_is_wrong_is_named_in_one_line(override, sentence):
    with pytest.raises((HydraException, OSError)) as caught:
        composed("config", [override])
    told = explained(caught.value)
    assert told is not None
    assert told.startswith(sentence)
    assert "\n" not in told


@pytest.mark.parametrize("error", [RuntimeError("a bug"), AssertionError()])
def test_a_bug_keeps_its_traceback(error, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", True)
    assert explained(error) is None
    with pytest.raises(type(error)):
        launch(raising(error))


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    files.write_text(path, "old")

    def refuse(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=r"No space left on device: .*result\.json"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_the_log_has_the_traceback_that_the_terminal_has_not(tmp_path, capsys):
    handler = logging.FileHandler(tmp_path / "train.log")
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(RunError, match="train: no"), failures_reported(tmp_path, log):
            raise ValueError("train: no")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert "ValueError: train: no" in (tmp_path / "train.log").read_text()
    assert (tmp_path / "failure.txt").read_text() == "train: no\n"
    assert capsys.readouterr().err == ""


def test_a_folder_that_holds_a_run_is_refused_and_stays_as_it_is(run, fast_run):
    before = {file: file.stat().st_mtime_ns for file in fast_run.rglob("*")}
    with (
        pytest.raises(
            RunError, match=r"holds a run already: continue it by resume=FOLDER, or choose another"
        ),
        failures_reported(fast_run, log),
    ):
        run(fast_run)
    assert {file: file.stat().st_mtime_ns for file in fast_run.rglob("*")} == before


def test_a_refused_resume_leaves_the_run_it_names_as_it_is(run, fast_run):
    before = {file: file.stat().st_mtime_ns for file in fast_run.rglob("*")}
    with pytest.raises(RunError, match="seed is 0 there and 5 here"), failures_reported(fast_run, log):
        run(fast_run, f"resume={fast_run}", "seed=5")
    assert {file: file.stat().st_mtime_ns for file in fast_run.rglob("*")} == before


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    other = pytest.raises(ValueError, match="another process is writing to this folder")
    with claimed(tmp_path), other, claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass


def test_a_sweeps_last_words_are_all_jobs_that_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "_is_sweep", lambda: True)
    monkeypatch.setattr(job, "failed", {})
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def sweep():
        for number in (1, 3):
            of_job = SimpleNamespace(job=SimpleNamespace(num=number, override_dirname=f"seed={number}"))
            monkeypatch.setattr(job.HydraConfig, "get", lambda of_job=of_job: of_job)
            with contextlib.suppress(RunError), failures_reported(tmp_path, log):
                raise ValueError(f"no {number}")
        raise RunError("no 1")

    with pytest.raises(SystemExit):
        launch(sweep)
    assert capsys.readouterr().err.splitlines() == [
        "2 jobs failed:",
        "  1 (seed=1): no 1",
        "  3 (seed=3): no 3",
    ]


# Signals


@pytest.fixture
def nothing_ignored():
    """Handle SIGINT even where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_is_raised_where_it_arrives():
    with signals_raised(), pytest.raises(Interrupted, match="Interrupted by SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_deferred_signal_waits_and_a_second_one_does_not(capfd, monkeypatch):
    with signals_raised(), signals_deferred() as waiting:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the same one, which torchrun has passed on
        monkeypatch.setattr(signals, "PASSED_ON", 0.0)
        assert waiting.number == signal.SIGTERM
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
    assert "SIGTERM: saving after this step; once more to stop at once." in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_ignored")
@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM])
def test_a_signal_saves_a_run_that_then_goes_on_as_if_nothing_had_happened(
    run, fast_run, tmp_path, monkeypatch, number
):
    real, calls = outer_step_of_the_loop(monkeypatch, number)
    with pytest.raises(Interrupted, match=r"by SIG.* after 3 of 4 iterations\. Resume with: python -m "):
        run(tmp_path, "checkpoint.every=100")
    assert calls == [1, 2, 3]
    assert checkpoint.load(tmp_path / checkpoint.FILE)["step"] == 3
    assert (tmp_path / "failure.txt").read_text().startswith("Interrupted by SIG")
    assert f"experiments.train resume={tmp_path}" in (tmp_path / "failure.txt").read_text()
    monkeypatch.setattr("experiments.run.outer.step", real)
    run(tmp_path, f"resume={tmp_path}", "checkpoint.every=100")
    assert (tmp_path / "metrics.jsonl").read_bytes() == (fast_run / "metrics.jsonl").read_bytes()
    assert (tmp_path / "result.json").read_bytes() == (fast_run / "result.json").read_bytes()
    assert not (tmp_path / "failure.txt").exists()


def outer_step_of_the_loop(monkeypatch, number):
    real, calls = outer.step, []

    def step(*arguments):
        calls.append(len(calls) + 1)
        if len(calls) == 3:
            signal.raise_signal(number)
        return real(*arguments)

    monkeypatch.setattr(outer, "step", step)
    return real, calls


def test_a_run_folder_cannot_go_on_in_another_folder(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[]")
    with pytest.raises(ValueError, match=r"continued in place, so hydra\.run\.dir cannot be another"):
        resume.command_line([f"resume={tmp_path}", "hydra.run.dir=new"])
