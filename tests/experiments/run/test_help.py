"""`--help` says a sentence of every key of its program, and of no other."""

import re
from dataclasses import fields

import pytest
import yaml
from hydra import compose, initialize_config_dir

from experiments.run import help
from experiments.run.config import SCHEMAS
from experiments.run.job import launch
from experiments.studies import attack, attack_images

PROGRAMS = {
    "config": (
        {
            *("task", "model", "algorithm", "optimizer", "schedule", "logger"),
            *("launcher", "sweeper", "experiment", "debug"),
        },
        "resume",
    ),
    attack.study.name: ({"logger", "preset"}, "surrogate.steps"),
    attack_images.study.name: ({"logger", "preset"}, "defense.cure"),
}


def composed(name, *overrides):
    with initialize_config_dir(str(help.CONF), version_base="1.3"):
        return compose(name, list(overrides))


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_of_one_program_alone(name):
    groups, key = PROGRAMS[name]
    text = help.text(name, "experiments.x", ["--help", "logger=none"])
    listed, _, keys = text.partition("Keys, with their values:")
    shown = set(re.findall(r"^  (\S+): ", listed, re.MULTILINE))
    assert shown - {"algorithm/inner", "algorithm/hypergradient"} == groups
    assert f"  {key} = " in keys
    assert "hydra." not in keys
    assert "logger.mode = disabled" in keys
    assert "none*" in listed


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_key_has_its_sentence(name):
    lines = [line for line in help._keys(composed(name)) if " = " in line]
    assert [line for line in lines if "  #" not in line] == []


def keys_without_a_sentence(schema, target):
    told = {item.name for item in fields(schema) if item.metadata.get("help")} | set(
        help.arguments_of(target)
    )
    return [item.name for item in fields(schema) if item.name not in told and not item.name.startswith("_")]


OPTIONS = [(group, name) for group in SCHEMAS for name in SCHEMAS[group] if group not in ("loss", "logger")]


def test_every_key_of_an_option_has_its_sentence():
    for group, name in OPTIONS:
        path, schema = help.CONF / group / f"{name}.yaml", SCHEMAS[group][name]
        file = yaml.safe_load(path.read_text()) if path.exists() else {}
        unsaid = keys_without_a_sentence(schema, file.get(group, file).get("_target_", schema._target_))
        assert set(unsaid) <= {"inner"}, (group, name)


def test_the_values_are_those_that_the_command_line_composes(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "algorithm.steps=7", "-h"])
    launch(lambda: None, "config", "experiments.train")
    out = capsys.readouterr().out
    assert "  algorithm.steps = 7 " in out
    assert "  algorithm.inner.momentum = 0.0 " in out
    assert "  schedule.factor = 1.0 " in out


def test_a_wrong_override_beside_help_is_a_sentence(capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr("sys.argv", ["train", "task=omniglt", "--help"])
    with pytest.raises(SystemExit) as ended:
        launch(lambda: None, "config", "experiments.train")
    assert ended.value.code == 1
    assert "There is no task=omniglt; the options are custom, " in capsys.readouterr().err


def described(x):
    """Do a thing.

    Args:
        x: The first :class:`thing`; more of it. And
            more.
        betas (Tuple[float, float], optional): coefficients (default: 1)

    Returns:
        y: nothing.
    """


def test_docstrings_of_both_styles_are_read(monkeypatch):
    monkeypatch.setattr(help, "get_object", lambda _: described)
    assert help.arguments_of("x") == {"x": "The first thing; more of it.", "betas": "Coefficients."}
