"""A study runs each cell once, and writes what there is after every one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from experiments.run.schema import Logger, LoggerName, key
from experiments.studies.study import Cell, Study, StudyConfig, by_cell, spread


@dataclass
class DrawsConfig(StudyConfig):
    """How many numbers are drawn."""

    count: int = key("Numbers.")
    names: list[str] = key("Cells.")


@pytest.fixture
def draws():
    """Return a study of random numbers, and the list of cells that it has run."""
    ran = []

    def draw(work, name, count):
        if (name, work.seed) == ("b", 1) and not ran.count("lost"):
            ran.append("lost")
            raise KeyboardInterrupt
        ran.append((name, work.seed))
        (work.folder / "numbers.txt").write_text("kept")
        return {"mean": torch.rand(count).mean().item(), "all": [1, 2]}

    def cells(config):
        return [
            Cell(name, seed, lambda work, name=name: draw(work, name, config.count))
            for name in config.names
            for seed in config.seeds
        ]

    def report(results, config):
        return "".join(f"{name} {len(own)}\n" for name, own in by_cell(results).items())

    yield Study("draws", DrawsConfig, cells=cells, report=report, figures=lambda *_: [], free=["names"]), ran
    ConfigStore.instance().repo.pop("draws_schema.yaml")


def configured(**options):
    logger = Logger(
        name=LoggerName.none, project="", entity=None, mode="disabled", group=None, notes=None, tags=[]
    )
    config = DrawsConfig(folder="", seeds=[0, 1], threads=1, count=3, names=["a", "b"], logger=logger)
    return replace(config, **options)


def test_a_study_goes_on_where_it_ended(draws, tmp_path):
    study, ran = draws
    with pytest.raises(KeyboardInterrupt):
        study.run(configured(), tmp_path)
    assert (tmp_path / "draws.md").read_text() == "a 2\nb 1\n"
    assert study.run(configured(), tmp_path) == "a 2\nb 2\n"
    assert ran == [("a", 0), ("a", 1), ("b", 0), "lost", ("b", 1)]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(one["cell"], one["seed"]) for one in results] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert (
        results[0]["mean"] == results[2]["mean"] != results[1]["mean"]
    )  # depends only on the seed of the cell
    assert (tmp_path / "b" / "1" / "numbers.txt").exists()


def test_other_settings_are_refused_but_cells_may_be_chosen(draws, tmp_path):
    study, ran = draws
    study.run(configured(names=["a"]), tmp_path)
    assert study.run(configured(names=["c"], seeds=[1]), tmp_path) == "c 1\n"
    assert ran[-1] == ("c", 1)
    with pytest.raises(
        ValueError, match=r"draws: .* holds a run with other settings, .*; choose another folder="
    ):
        study.run(configured(count=4), tmp_path)


def test_no_seed_is_an_error(draws):
    with pytest.raises(ValueError, match=r"draws: seeds is empty; give at least one, seeds=\[0\]."):
        draws[0].typed(OmegaConf.structured(configured(seeds=[])))


@pytest.mark.parametrize(("seed", "message"), [(-1, "at least 0, got -1"), (2**63, r"below 2\*\*63, got 9")])
def test_a_seed_that_torch_does_not_take_is_an_error(draws, seed, message):
    with pytest.raises(ValueError, match=f"draws: seeds must be {message}"):
        draws[0].typed(OmegaConf.structured(configured(seeds=[0, seed])))


def test_spread_is_mean_and_standard_deviation():
    assert (spread([1.0]), spread([1.0, 2.0, 3.0], 2)) == ("1.0", "2.00 ± 1.00")
