import sys
from unittest import mock

import numpy as np
import pytest
from matplotlib.image import imsave

from experiments.run import config
from experiments.run import loggers as mirror_module
from experiments.run.loggers import Mirror, open_mirror


@pytest.fixture
def wandb(monkeypatch):
    """Return a stand-in for the module, whose runs record their calls."""
    module = mock.Mock(Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def open_and_log(composed, tmp_path, resumed_at):
    config = composed("logger=wandb", "logger.notes='A note.'").logger
    with open_mirror(config, tmp_path / "day" / "time", {"seed": 0}, resumed_at=resumed_at) as mirror:
        mirror.log(5, {"train/query_loss": 1.0})


def test_metrics_have_our_step_on_their_axis_and_the_run_is_finished(composed, wandb, tmp_path):
    open_and_log(composed, tmp_path, None)
    assert wandb.init.return_value.mock_calls == [
        mock.call.define_metric("step"),
        mock.call.define_metric("*", step_metric="step"),
        mock.call.log({"step": 5, "train/query_loss": 1.0}),
        mock.call.finish(),
    ]
    settings = wandb.init.call_args.kwargs
    assert (settings["name"], settings["notes"], settings["dir"]) == (
        "day/time",
        "A note.",
        tmp_path / "day" / "time",
    )
    assert settings["config"] == {"seed": 0, "resumed_at": None}


def test_a_run_that_goes_on_in_its_folder_is_the_same_wandb_run(composed, wandb, tmp_path):
    for name in ("offline-run-20260102_000000-second", "run-20260101_000000-first"):
        (tmp_path / "day" / "time" / "wandb" / name).mkdir(parents=True)
    for resumed_at, expected in ((None, (None, None)), (16, ("second", "allow"))):
        open_and_log(composed, tmp_path, resumed_at)
        settings = wandb.init.call_args.kwargs
        assert (settings["id"], settings["resume"]) == expected


def test_a_run_that_fails_is_finished_as_failed_and_its_traceback_is_not_printed(
    composed, wandb, tmp_path, capsys
):
    with (
        pytest.raises(KeyboardInterrupt),
        open_mirror(composed("logger=wandb").logger, tmp_path, {}, resumed_at=None),
    ):
        raise KeyboardInterrupt
    assert wandb.init.return_value.mock_calls[-1] == mock.call.finish(exit_code=1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("logger", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_without_its_package_there_is_no_mirror_and_one_warning(
    composed, tmp_path, monkeypatch, caplog, logger, module
):
    monkeypatch.setitem(sys.modules, module, None)
    mirror_module._warn_that_it_is_missing.cache_clear()
    for _ in range(2):
        with open_mirror(composed(f"logger={logger}").logger, tmp_path, {}, resumed_at=None) as mirror:
            assert type(mirror) is Mirror
    assert [
        message for message in caplog.messages if f"The package {logger} is not installed" in message
    ] == (caplog.messages[:1])


def test_csv_files_hold_metrics_and_tables_and_a_resumed_run_drops_later_steps(composed, tmp_path):
    config = composed("logger=csv").logger
    for resumed_at in (None, 5):
        with open_mirror(config, tmp_path, {}, resumed_at=resumed_at) as mirror:
            for step in (5, 6) if resumed_at is None else (6,):
                mirror.log(step, {"train/loss": step / 2, "seconds": 1.0})
            mirror.table("memory", [{"path": "inner, 0", "bytes": 8}])
    rows = ["step,name,value", "5,train/loss,2.5", "5,seconds,1.0", "6,train/loss,3.0", "6,seconds,1.0"]
    assert (tmp_path / "metrics.csv").read_text().splitlines() == rows
    assert (tmp_path / "memory.csv").read_text() == 'path,bytes\n"inner, 0",8\n'


@pytest.mark.parametrize(
    ("variables", "login", "name"),
    [
        ({}, "machine api.github.com", "csv"),
        ({}, "machine api.wandb.ai", "wandb"),
        ({"WANDB_API_KEY": "0"}, "", "wandb"),
        ({"WANDB_MODE": "offline"}, "", "wandb"),
    ],
)
def test_wandb_is_the_default_where_it_has_a_key_or_a_mode(tmp_path, monkeypatch, variables, login, name):
    (tmp_path / "netrc").write_text(login)
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"NETRC": str(tmp_path / "netrc"), **variables}.items():
        monkeypatch.setenv(variable, value)
    assert config.composed("config", []).logger.name.value == name


def test_tensorboard_gets_scalars_images_tables_and_results(composed, tmp_path, monkeypatch):
    tensorboard = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    imsave(tmp_path / "curve.png", np.zeros((2, 3, 3)))
    with open_mirror(composed("logger=tensorboard").logger, tmp_path, {"seed": 0}, resumed_at=4) as mirror:
        mirror.log(5, {"train/loss": 1.0})
        mirror.table("memory/phases", [{"phase": "inner", "bytes": 8}])
        mirror.summarise({"test/loss": 0.5})
        mirror.images([tmp_path / "curve.png"])
    opened = tensorboard.SummaryWriter
    opened.assert_called_once_with(str(tmp_path / "tensorboard"), purge_step=5)
    opened.return_value.__exit__.assert_called_once()
    writer = opened.return_value.__enter__.return_value
    (name, text), _ = writer.add_text.call_args_list[0]
    assert name == "config"
    assert '"seed": 0' in text
    assert writer.add_scalar.call_args == mock.call("train/loss", 1.0, 5)
    assert writer.add_text.call_args_list[1:] == [
        mock.call("memory/phases", "| phase | bytes |\n| --- | --- |\n| inner | 8 |"),
        mock.call("result/test/loss", "0.5"),
    ]
    (name, image), settings = writer.add_image.call_args
    assert (name, image.shape, settings) == ("plots/curve", (2, 3, 4), {"dataformats": "HWC"})
