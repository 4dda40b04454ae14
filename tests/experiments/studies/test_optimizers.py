"""The study of optimizers over seeds, and the physics-informed network that is one of its workloads."""

import math
from dataclasses import replace

import pytest
import torch

import metagrad as mg
from experiments.studies import optimizers
from experiments.studies.characters import Examples
from experiments.studies.equations import EQUATIONS, VISCOSITY, cole_hopf, spectral
from experiments.studies.optimizers import OPTIMIZERS, by_workload, cells, rows, study


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_gradient_of_the_residuals_is_that_of_the_textbook(name):
    """Both forms of a loss agree, and for Poisson's equation with the closed form of a tanh unit's Laplacian."""
    torch.manual_seed(0)
    equation = EQUATIONS[name]()
    equation = equation._replace(inside=equation.inside[::7])
    params = dict(equation.network.named_parameters())
    loss = equation.loss()
    own = torch.autograd.grad(loss, list(params.values()))
    optimizer = mg.optim.GaussNewton(params.items())
    other = torch.autograd.grad(equation.loss_of(optimizer), list(params.values()))
    for g, e in zip(own, other, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-9, atol=1e-9)
    if name == "poisson":
        first, bias, last, shift = params.values()
        x = equation.inside
        t = torch.tanh(x @ first.T + bias)
        laplace = (-2 * t * (1 - t * t) * first.square().sum(1)) @ last[0]
        edge = torch.tanh(equation.edge.x @ first.T + bias) @ last[0] + shift
        right = -2 * math.pi**2 * torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])
        torch.testing.assert_close(loss, (laplace - right).square().mean() + edge.square().mean())


@pytest.mark.parametrize("name", ["poisson", "helmholtz"])
def test_the_solution_has_no_residual(name):
    waves = math.pi * torch.tensor([1.0, 1.0 if name == "poisson" else 4.0], dtype=torch.float64)

    class Solution(torch.nn.Module):
        def forward(self, z):
            return (waves * z).sin().prod(-1, keepdim=True)

    equation = EQUATIONS[name]()._replace(network=Solution())
    assert float(equation.loss().detach()) < 1e-20
    assert equation.error() < 1e-12


def test_the_reference_solutions_satisfy_their_equations():
    """Central differences of the reference, whose errors are the fourth derivatives times the squared steps."""
    h = 1e-3
    z = torch.tensor([[0.3, 0.4], [0.6, -0.7], [0.1, 0.2]], dtype=torch.float64)
    step = torch.eye(2, dtype=torch.float64) * h
    u, t0, t1, x0, x1 = (cole_hopf(z + d) for d in (0 * step[0], -step[0], step[0], -step[1], step[1]))
    residual = (t1 - t0) / (2 * h) + u * (x1 - x0) / (2 * h) - VISCOSITY * (x1 - 2 * u + x0) / h**2
    assert float(residual.abs().max()) < 1e-4
    every = 0.01
    times, places, values = spectral(every)
    dx = float(places[1] - places[0])
    i = torch.arange(20, 80)
    t = (values[i + 1] - values[i - 1]) / (2 * every)
    xx = (values[i].roll(1, 1) - 2 * values[i] + values[i].roll(-1, 1)) / dx**2
    residual = t - 1e-4 * xx + 5 * (values[i] ** 3 - values[i])
    assert float(residual[:, 10:-10].abs().median()) < 2e-3
    assert len(times) == 100


def test_gauss_newton_by_dense_systems_solves_poissons_equation():
    torch.manual_seed(0)
    problem = optimizers.WORKLOADS["poisson"]()
    made = OPTIMIZERS["gauss_newton"](problem.model.named_parameters(), damping=1e-3, change=3.0)
    for _ in range(40):
        assert optimizers.stepped(problem, made, problem.train)
    assert problem.measure()["error/test"] < 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_a_loss(name):
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    data = Examples(x, (x[:, 0] > 0).long())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    problem = optimizers.Problem(model, data, data, data, 20)
    made = OPTIMIZERS[name](model if name in optimizers.OF_MODELS else model.named_parameters())
    before = problem.measure()["loss/train"]
    for _ in range(5):
        assert optimizers.stepped(problem, made, data)
    assert problem.measure()["loss/train"] < before


def test_the_trials_of_an_optimizer_come_before_its_runs(configured):
    settings = replace(configured(study), optimizers=["adam"], workloads=["poisson"], seeds=[1, 2])
    listed = [(cell.name, cell.seed) for cell in cells(settings)]
    trials = [(f"poisson/adam/trial{i}", 100) for i in range(3)]
    assert listed == [*trials, ("poisson/adam/chosen", 1), ("poisson/adam/chosen", 2)]


def of_run(optimizer, seed, losses, *, is_finite=True):
    curve = {"step": [0, 1, 2], "seconds": [0.0, 1.0, 2.0]}
    curve |= {"loss/train": losses, "error/test": losses}
    return {
        "workload": "poisson",
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
    runs = by_workload([*adam, *other])["poisson"]
    assert optimizers.values_at("poisson", runs["lbfgs"], runs, 1.5) == [0.5, 0.5, 0.5]
    assert optimizers.values_at("poisson", runs["lbfgs"], runs, 2.0) == [0.02, 0.02, math.inf]
    first, last = rows("poisson", runs)
    assert first[:4] == ["lbfgs", "lr=1", "0.02 (0.02 to inf)", "100"]
    assert last[:4] == ["adam", "lr=1", "2 (1 to 3)", "1"]
