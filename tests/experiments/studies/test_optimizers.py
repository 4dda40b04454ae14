"""The study of optimizers over seeds, and the physics-informed network that is one of its workloads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import metagrad as mg
from experiments.studies import optimizers
from experiments.studies.characters import Examples
from experiments.studies.optimizers import OPTIMIZERS, by_workload, cells, rows, study


def test_the_gradient_of_the_residuals_is_that_of_the_textbook():
    """The Laplacian of a tanh unit has a closed form, whose gradient comes from plain torch."""
    torch.manual_seed(0)
    model = mg.models.MLP([2, 5, 1], torch.nn.Tanh).double()
    (x, y), _ = optimizers.points(3)
    own = torch.autograd.grad(optimizers.residuals(model, x, y).square().mean(), list(model.parameters()))
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
    (x, y), (tested, values) = optimizers.points(4)
    assert optimizers.residuals(lambda at: optimizers.solution(at)[:, None], x, y).abs().max() < 1e-12  # type: ignore[arg-type]
    assert len(x) == 16 + 16
    assert torch.equal(values, optimizers.solution(tested))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_loss(name):
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    data = Examples(x, (x[:, 0] > 0).long())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    problem = optimizers.Problem(model, data, data, data, 20)
    made = OPTIMIZERS[name](model if name in optimizers.OF_MODELS else model.parameters())
    before = problem.measure()["loss/train"]
    for _ in range(5):
        assert optimizers.stepped(problem, made, data)
    assert problem.measure()["loss/train"] < before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workloads=[none]", r"optimizers: workloads must be of \[.*\], with trials and seconds, got 'none'"),
        ("optimizers=[none]", r"optimizers: trials\.pinn has no \['none'\]"),
    ],
)
def test_what_is_no_comparison_is_an_error(configured, override, message):
    with pytest.raises(ValueError, match=message):
        configured(study, override)


def test_the_trials_of_an_optimizer_come_before_its_runs(configured):
    settings = replace(configured(study), optimizers=["adam"], workloads=["pinn"], seeds=[1, 2])
    listed = [(cell.name, cell.seed) for cell in cells(settings)]
    trials = [(f"pinn/adam/trial{i}", 100) for i in range(3)]
    assert listed == [*trials, ("pinn/adam/chosen", 1), ("pinn/adam/chosen", 2)]


def of_run(optimizer, seed, losses, *, is_finite=True):
    curve = {"step": [0, 1, 2], "seconds": [0.0, 1.0, 2.0]}
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


def test_medians_are_at_equal_seconds_and_a_run_that_diverged_is_at_infinity():
    adam = [of_run("adam", seed, [8.0, 4.0, end]) for seed, end in enumerate((1.0, 2.0, 3.0))]
    other = [of_run("lbfgs", seed, [8.0, 0.5, 0.02]) for seed in range(3)]
    other[2]["is_finite"] = False
    runs = by_workload([*adam, *other])["pinn"]
    assert optimizers.values_at("pinn", runs["lbfgs"], runs, 1.5) == [0.5, 0.5, 0.5]
    assert optimizers.values_at("pinn", runs["lbfgs"], runs, 2.0) == [0.02, 0.02, math.inf]
    first, last = rows("pinn", runs)
    assert first[:4] == ["lbfgs", "lr=1", "0.02 (0.02 to inf)", "100"]
    assert last[:4] == ["adam", "lr=1", "2 (1 to 3)", "1"]


@pytest.mark.slow
def test_the_small_preset_makes_page_and_figure(configured, tmp_path):
    small = configured(study, "preset=small", "workloads=[pinn]", "optimizers=[lbfgs]", "seconds.pinn=0.05")
    assert "| lbfgs | history_size=" in study.run(small, tmp_path)
    assert (tmp_path / "optimizers.png").stat().st_size > 10_000
    assert (tmp_path / "curves.json").exists()
