"""A study runs each cell once, and writes what there is after every one."""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from experiments.run.schema import Logger, LoggerName, key
from experiments.studies import (
    algorithms,
    attack_images,
    attribution,
    clean,
    curvature,
    distill,
    landscape,
    optimizers,
    search,
)
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


def settings(**options):
    logger = Logger(
        name=LoggerName.none, project="", entity=None, mode="disabled", group=None, notes=None, tags=[]
    )
    config = DrawsConfig(folder="", seeds=[0, 1], threads=1, count=3, names=["a", "b"], logger=logger)
    return replace(config, **options)


def test_a_study_goes_on_where_it_ended(draws, tmp_path):
    study, ran = draws
    with pytest.raises(KeyboardInterrupt):
        study.run(settings(), tmp_path)
    assert (tmp_path / "draws.md").read_text() == "a 2\nb 1\n"
    assert study.run(settings(), tmp_path) == "a 2\nb 2\n"
    assert ran == [("a", 0), ("a", 1), ("b", 0), "lost", ("b", 1)]
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(one["cell"], one["seed"]) for one in results] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert (
        results[0]["mean"] == results[2]["mean"] != results[1]["mean"]
    )  # depends only on the seed of the cell
    assert (tmp_path / "b" / "1" / "numbers.txt").exists()


def test_other_settings_are_refused_but_cells_may_be_chosen(draws, tmp_path):
    study, ran = draws
    study.run(settings(names=["a"]), tmp_path)
    assert study.run(settings(names=["c"], seeds=[1]), tmp_path) == "c 1\n"
    assert ran[-1] == ("c", 1)
    with pytest.raises(ValueError, match=r"draws: .* a run with other settings, .* another folder="):
        study.run(settings(count=4), tmp_path)


def test_no_seed_is_an_error(draws):
    with pytest.raises(ValueError, match=r"draws: seeds is empty; give at least one, seeds=\[0\]."):
        draws[0].typed(OmegaConf.structured(settings(seeds=[])))


WRONG = [
    (algorithms, "only=[other]", r"only has \['other'\]; there are"),
    (attack_images, "defenses=[cure,dropout]", "defenses must be some of plain, gradient, .*'dropout'"),
    (attack_images, "defense.epsilon=0.3", "epsilons must .* defense.epsilon=0.3 among them"),
    (attribution, "data=cifar", "data must be one of mnist, omniglot, got 'cifar'"),
    (attribution, "drops=[1.5]", "drops and wrong must be shares above 0 and below 1"),
    (clean, "penalties=[]", "penalties is empty; give at least one"),
    (clean, "methods=[newton]", "methods has 'newton'; expected some of CG, "),
    (curvature, "problems=[conv]", "problems must be among sinusoid, omniglot, got conv"),
    (curvature, "measure.probes=5", "measure.probes must be at least 6, got 5"),
    (distill, "+cost.vgg=[1]", "networks are mlp, convnet, got 'vgg'"),
    (landscape, "only=[sgd]", "only must be among gd, .*, got sgd"),
    (landscape, "runs.adam.rho=0.1", "runs.adam has a rho .* for method=gd, got adam"),
    (optimizers, "workloads=[none]", r"workloads must be of \[.*\], with trials and seconds, got 'none'"),
    (optimizers, "optimizers=[none]", r"trials\.poisson has no \['none'\]"),
    (search, "methods=[sgd]", "methods must be among first_order, .*, got sgd"),
]


@pytest.mark.parametrize(("program", "override", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_settings_are_errors_that_name_the_study(configured, program, override, message):
    with pytest.raises(ValueError, match=f"{program.study.name}: .*{message}"):
        configured(program.study, override)


@pytest.mark.parametrize(("seed", "message"), [(-1, "at least 0, got -1"), (2**63, r"below 2\*\*63, got 9")])
def test_a_seed_that_torch_does_not_take_is_an_error(draws, seed, message):
    with pytest.raises(ValueError, match=f"draws: seeds must be {message}"):
        draws[0].typed(OmegaConf.structured(settings(seeds=[0, seed])))


def test_spread_is_mean_and_standard_deviation():
    assert (spread([1.0]), spread([1.0, 2.0, 3.0], 2)) == ("1.0", "2.00 ± 1.00")
