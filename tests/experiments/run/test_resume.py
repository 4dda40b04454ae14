"""A resumed run ends with the same bytes as a run without interruption."""

import json
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.run import checkpoint, resume
from experiments.run.metrics import read_rows

SETTINGS = [
    "debug=fast",
    "logger=none",
    "device=cpu",
    "iterations=120",
    "evaluate.every=50",
    "checkpoint.every=16",
    "schedule=cosine",
    "algorithm.inner.momentum=0.5",
]


@pytest.fixture(scope="module")
def whole(program, tmp_path_factory):
    """Return the folder of a run that nothing interrupts."""
    cwd = tmp_path_factory.mktemp("whole")
    code, _, err = program("train", *SETTINGS, "hydra.run.dir=run", cwd=cwd)
    assert code == 0, err
    return cwd / "run"


@pytest.fixture(scope="module")
def killed(start_program, tmp_path_factory):
    """Return the folder of the same run, killed by SIGKILL in the middle."""
    cwd = tmp_path_factory.mktemp("killed")
    process = start_program("train", *SETTINGS, "hydra.run.dir=run", cwd=cwd)
    metrics = cwd / "run" / "metrics.jsonl"
    while len(read_rows(metrics)) < 20 and process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (cwd / "run" / "result.json").exists()
    return cwd / "run"


def test_auto_goes_on_from_the_checkpoint_of_its_own_folder_if_there_is_one(tmp_path):
    assert resume.settled("auto", tmp_path) is None
    assert resume.settled(None, tmp_path) is None
    assert resume.settled("elsewhere", tmp_path) == "elsewhere"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / checkpoint.FILE).touch()
    assert resume.settled("auto", tmp_path) == str(tmp_path)
    assert resume.settled(None, tmp_path) is None


@pytest.mark.slow
def test_a_command_that_is_run_again_with_auto_goes_on(program, whole, killed, tmp_path):
    shutil.copytree(killed, tmp_path / "run")
    code, _, err = program("train", *SETTINGS, "hydra.run.dir=run", "resume=auto", cwd=tmp_path)
    assert code == 0, err
    same_outcome(tmp_path / "run", whole)


def same_outcome(one, other):
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert (one / "result.json").read_bytes() == (other / "result.json").read_bytes()


@pytest.mark.slow
def test_a_checkpoint_file_starts_a_new_run_that_ends_the_same(program, whole, killed, tmp_path):
    left = (killed / "metrics.jsonl").read_bytes()
    file = killed / checkpoint.FILE
    code, _, err = program("train", *SETTINGS, f"resume={file}", "hydra.run.dir=run", cwd=tmp_path)
    assert code == 0, err
    same_outcome(tmp_path / "run", whole)
    assert (killed / "metrics.jsonl").read_bytes() == left


@pytest.mark.slow
def test_a_run_folder_goes_on_in_place_and_ends_the_same(program, whole, killed, tmp_path):
    overrides = (killed / ".hydra" / "overrides.yaml").read_bytes()
    step = checkpoint.load(killed / checkpoint.FILE)["step"]
    assert 16 <= step < 120
    code, out, err = program("train", f"resume={killed}", cwd=tmp_path)
    assert code == 0, err
    assert f"at step {step}" in out
    same_outcome(killed, whole)
    assert (killed / ".hydra" / "overrides.yaml").read_bytes() == overrides
    assert [entry["step"] for entry in json.loads((killed / "provenance.json").read_text())["resumed"]] == [
        step
    ]
    assert not (tmp_path / "outputs").exists()


def run_folder(path):
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra" / "overrides.yaml").write_text("- seed=3\n- task.shots=5\n")
    return path


@pytest.mark.parametrize("name", ["run", "lr=0.1,seed=(1)", "it's \\'a\\", "1"])
def test_a_folder_brings_its_overrides_and_those_given_come_later(tmp_path, monkeypatch, name):
    folder = run_folder(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    told = shlex.split(resume.how_to(folder))
    assert told[:5] == ["Resume", "with:", "python", "-m", "experiments.train"]
    completed = resume.command_line([*told[5:], "logger=none"])
    assert completed[:2] + completed[3:4] == ["seed=3", "task.shots=5", "logger=none"]
    read = OverridesParser.create().parse_override(completed[4])
    assert (read.key_or_group, str(read.value())) == ("hydra.run.dir", name)


@pytest.mark.parametrize("arguments", [[], ["seed=1"], ["resume=file.pt", "-m"], ["resume=null"]])
def test_other_command_lines_stay_as_they_are(arguments):
    assert resume.command_line(arguments) == arguments


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no \.hydra/overrides\.yaml"):
        resume.command_line([f"resume={tmp_path}"])


def test_a_finished_run_can_be_resumed_and_changes_nothing(run, fast_run, tmp_path):
    again = run(tmp_path, f"resume={fast_run / checkpoint.FILE}")
    same_outcome(again, fast_run)
