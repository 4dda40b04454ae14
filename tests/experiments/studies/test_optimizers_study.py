"""The study of optimizers over seeds, and the physics-informed network that is one of its workloads."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir

from experiments.studies.optimizers import poisson, summary
from experiments.studies.optimizers.models import double_mlp
from experiments.studies.optimizers.study import cells, check, settings_of, study
from experiments.studies.optimizers.training import gradients_of_work, raced, start
from tests.experiments.conftest import REPOSITORY


@pytest.fixture(scope="module")
def config():
    """Return a function from overrides to a typed config."""

    @functools.cache
    def build_config(*overrides):
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return study.typed(compose("optimizers_study", ["logger=none", *overrides]))

    return build_config


def test_a_preset_overrides_a_setting_that_trials_share(tmp_path):
    """OmegaConf refused it: "Value 'AnyNode' is not a supported primitive type"."""
    for place in ("preset", "preset/optimizers_study"):
        (tmp_path / place).mkdir()
        text = "# @package _global_\nshared: {pinn: {lbfgs: max_iter=7}}\n"
        (tmp_path / place / "mine.yaml").write_text(text)
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        found = compose("optimizers_study", [f"hydra.searchpath=[file://{tmp_path}]", "preset=mine"])
    assert study.typed(found).shared["pinn"]["lbfgs"] == "max_iter=7"


def test_the_gradient_of_the_residuals_is_that_of_the_textbook():
    """Of a tanh unit, the Laplacian is a closed form, whose gradient is taken by plain torch."""
    torch.manual_seed(0)
    model = double_mlp([2, 5, 1])
    (x, y), _ = poisson.points(3)
    own = torch.autograd.grad(poisson.residuals(model, x, y).square().mean(), list(model.parameters()))
    first, bias, last, shift = model.parameters()
    t = torch.tanh(x @ first.T + bias)
    u = t @ last[0] + shift
    laplace = (-2 * t * (1 - t * t) * first.square().sum(1)) @ last[0]
    inside = torch.arange(len(x)) < 9
    right = -2 * math.pi**2 * torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])
    loss = (laplace - right)[inside].square().mean() + u[~inside].square().mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for g, e in zip(own, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-9)


def test_the_solution_has_no_residual():
    (x, y), (tested, values) = poisson.points(4)
    assert poisson.residuals(lambda at: poisson.solution(at)[:, None], x, y).abs().max() < 1e-12  # type: ignore[arg-type]
    assert len(x) == 16 + 16
    assert torch.equal(values, poisson.solution(tested))


BAD = [
    ({"tuning_seed": 0}, r"optimizers_study: tuning_seed=0 is one of seeds"),
    (
        {"workloads": ["none"]},
        r"optimizers_study: workloads must be of \[.*\], with trials and seconds, got 'none'",
    ),
    ({"optimizers": ["none"]}, r"optimizers_study: trials\.pinn has no \['none'\]"),
    ({"trials": {"pinn": {"adam": ["a"], "sgd": ["a", "b"]}}}, r"as many trials on pinn, got \{'adam': 1,"),
    ({"seconds": {"pinn": 0.0}}, r"optimizers_study: seconds\.pinn must be above 0, got 0\.0\."),
    ({"trial_part": 0.0}, r"optimizers_study: trial_part must be above 0 and at most 1, got 0\.0\."),
    ({"evaluations": 0}, r"optimizers_study: evaluations must be at least 1, got 0"),
]


def test_what_is_no_comparison_is_refused(config):
    settings = config()
    for changes, message in BAD:
        with pytest.raises(ValueError, match=message):
            check(replace(settings, **changes))


def test_the_trials_of_an_optimizer_come_before_its_runs(config):
    settings = replace(config(), optimizers=["adam"], workloads=["pinn"], seeds=[1, 2])
    listed = [(cell.name, cell.seed) for cell in cells(settings)]
    trials = [(f"pinn/adam/trial{i}", 100) for i in range(3)]
    assert listed == [*trials, ("pinn/adam/chosen", 1), ("pinn/adam/chosen", 2)]


def of_run(optimizer, seed, losses, *, is_finite=True):
    curve = {"step": [0, 1, 2], "seconds": [0.0, 1.0, 2.0], "gradients": [0.0, 10.0, 20.0]}
    curve |= {"loss/train": losses, "error/test": losses}
    return {
        "workload": "pinn",
        "optimizer": optimizer,
        "trial": "lr=1",
        "trials": 3,
        "seed": seed,
        "is_finite": is_finite,
        "curve": curve,
    }


def test_medians_are_at_equal_seconds_and_a_run_that_diverged_is_at_infinity(config):
    adam = [of_run("adam", seed, [8.0, 4.0, end]) for seed, end in enumerate((1.0, 2.0, 3.0))]
    other = [of_run("lbfgs", seed, [8.0, 0.5, 0.02]) for seed in range(3)]
    other[2]["is_finite"] = False
    runs = summary.by_workload([*adam, *other])["pinn"]
    assert summary.limits(runs) == (2.0, 20.0)
    assert summary.values_at("pinn", runs["lbfgs"], runs, "seconds", 1.5) == [0.5, 0.5, 0.5]
    assert summary.values_at("pinn", runs["lbfgs"], runs, "seconds", 2.0) == [0.02, 0.02, math.inf]
    first, last = summary.rows("pinn", runs)
    assert first[:4] == ["lbfgs", "lr=1", "0.02 (0.02 to inf)", "100"]
    assert last[:4] == ["adam", "lr=1", "2 (1 to 3)", "1"]
    assert "3 trials, on seed 100" in summary.report([*adam, *other], config())


@pytest.mark.slow
def test_a_run_ends_after_its_seconds_and_work_is_counted():
    settings = settings_of("pinn", "lbfgs", "max_iter=20")
    run = start(settings, 0)
    curve, is_finite = raced(run, 0.05, 2)
    assert is_finite
    assert curve["seconds"][-1] >= 0.05
    assert curve["work"][-1] == run.step.work > curve["step"][-1]
    # A call of the closure is a gradient, and its first is counted by the same operations.
    assert gradients_of_work(settings, 0) == pytest.approx(1, rel=0.1)


@pytest.mark.slow
def test_the_small_preset_makes_page_and_figure_and_goes_on(config, tmp_path):
    small = config("preset=small", "workloads=[pinn]", "optimizers=[lbfgs]", "seconds.pinn=0.05")
    page = study.run(small, tmp_path)
    assert "| lbfgs | history_size=" in page
    assert (tmp_path / "optimizers_study.png").stat().st_size > 10_000
    file = tmp_path / "pinn" / "lbfgs" / "chosen" / "0" / "result.json"
    before = file.stat().st_mtime_ns
    assert "| adam | lr=" in study.run(
        config("preset=small", "workloads=[pinn]", "seconds.pinn=0.05"), tmp_path
    )
    assert file.stat().st_mtime_ns == before
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2 * (3 + 2)
