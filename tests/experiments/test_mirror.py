from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from experiments import mirror as mirror_module
from experiments.mirror import Mirror, open_mirror


class Recorder:
    """Stand in for a wandb run and for the module, and remember what is called."""

    Error = RuntimeError

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

    def finish(self, exit_code=0):
        self.calls.append(("finish", exit_code))


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
        ("finish", 0),
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


def test_a_run_that_fails_is_finished_as_failed_and_its_traceback_is_not_printed(
    composed, wandb, tmp_path, capsys
):
    with (
        pytest.raises(KeyboardInterrupt),
        open_mirror(composed("logger=wandb").logger, tmp_path, {}, resumed_at=None),
    ):
        raise KeyboardInterrupt
    assert wandb.calls[-1] == ("finish", 1)
    assert capsys.readouterr().err == ""


def test_a_wandb_that_does_not_begin_is_one_sentence(composed, wandb, tmp_path, monkeypatch):
    def refuse(**_):
        raise RuntimeError("api_key not configured\nUse wandb.login()")

    monkeypatch.setattr(wandb, "init", refuse)
    with (
        pytest.raises(
            ValueError, match=r"does not begin \(api_key not configured\)\. Set logger\.mode=offline"
        ),
        open_mirror(composed("logger=wandb").logger, tmp_path, {}, resumed_at=None),
    ):
        pass


def test_without_wandb_there_is_no_mirror_and_one_warning(composed, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    mirror_module._warn_that_it_is_missing.cache_clear()
    for _ in range(2):
        with open_mirror(composed("logger=wandb").logger, tmp_path, {}, resumed_at=None) as mirror:
            assert type(mirror) is Mirror
    assert [message for message in caplog.messages if "wandb is not installed" in message] == caplog.messages[
        :1
    ]
