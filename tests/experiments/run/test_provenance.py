import json
import platform
import shutil
import subprocess

import pytest
import torch

from experiments.run import provenance

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def commit(folder):
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "a"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *arguments], check=True)


def test_what_is_known_when_a_run_starts(tmp_path):
    provenance.write(tmp_path, seed=3)
    record = json.loads((tmp_path / provenance.FILE).read_text())
    assert record["seed"] == 3
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["python"] == platform.python_version()
    assert record["versions"]["metagrad"]
    assert record["threads"]["of torch"] == torch.get_num_threads()
    assert {"time", "command", "seed", "git", "platform", "devices", "environment", "optional"} <= set(record)


@needs_git
def test_commit_and_changes_are_told(tmp_path):
    (tmp_path / "a").write_text("1")
    commit(tmp_path)
    clean = provenance.git(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert provenance.git(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git(tmp_path) is None


def test_a_resumed_run_adds_to_the_record(tmp_path):
    provenance.write(tmp_path, seed=3)
    first = json.loads((tmp_path / provenance.FILE).read_text())
    provenance.write(tmp_path, seed=3, resumed={"from": "last.pt", "step": 20})
    record = json.loads((tmp_path / provenance.FILE).read_text())
    assert [(entry["from"], entry["step"]) for entry in record.pop("resumed")] == [("last.pt", 20)]
    assert record == first
