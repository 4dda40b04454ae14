from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from experiments.mirror import open_mirror


class Recorder:
    """Stand in for a wandb run and for the module, and remember what is called."""

    def __init__(self):
        self.calls = []
        self.summary = {}

    def init(self, **settings):
        self.calls.append(("init", settings))
        return self

    def Settings(self, **settings):
        return SimpleNamespace(**settings)

    def define_metric(self, name, **settings):
        self.calls.append(("define_metric", (name, settings)))

    def log(self, values):
        self.calls.append(("log", values))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.calls.append(("finish", None))


@pytest.fixture
def wandb(monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    return recorder


def open_and_log(composed, tmp_path, resumed_at):
    config = composed("logger=wandb", "logger.notes='A note.'").logger
    with open_mirror(config, tmp_path / "day" / "time", {"seed": 0}, resumed_at=resumed_at) as mirror:
        mirror.log(5, {"train/query_loss": 1.0})


def test_metrics_have_our_step_on_their_axis_and_the_run_is_finished(composed, wandb, tmp_path):
    open_and_log(composed, tmp_path, None)
    assert wandb.calls[1:] == [
        ("define_metric", ("step", {})),
        ("define_metric", ("*", {"step_metric": "step"})),
        ("log", {"step": 5, "train/query_loss": 1.0}),
        ("finish", None),
    ]
    settings = wandb.calls[0][1]
    assert (settings["name"], settings["notes"], settings["dir"]) == (
        "day/time",
        "A note.",
        tmp_path / "day" / "time",
    )
    assert settings["config"] == {"seed": 0, "resumed_at": None}


def test_a_continued_run_says_so(composed, wandb, tmp_path):
    open_and_log(composed, tmp_path, 16)
    settings = wandb.calls[0][1]
    assert settings["notes"] == "A note. Continues at step 16."
    assert settings["config"]["resumed_at"] == 16
