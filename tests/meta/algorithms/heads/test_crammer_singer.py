"""The dual of the multi-class support vector machine: optimality conditions, finite differences, its failures."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.meta.algorithms.heads import crammer_singer
from metagrad.meta.algorithms.heads.crammer_singer import Dual, solve
from tests.marks import slow


def problem(tasks=4, ways=3, shots=4, features=20, C=0.1, damping=1.0, spread=1.0):
    labels = torch.arange(ways).repeat(tasks, shots)
    x = spread * torch.randn(tasks, ways * shots, features, dtype=torch.float64)
    x[..., :ways] += F.one_hot(labels, ways)
    eye = torch.eye(ways * shots, dtype=torch.float64)
    return x, lambda x: Dual(x @ x.mT + damping * eye, F.one_hot(labels, ways).double(), C)


def residual(dual, alpha):
    """How far a point is from feasible and optimal: zero at the solution, which is unique."""
    bound = dual.C * dual.labels
    descent = dual.labels - dual.gram @ alpha
    multipliers = descent - descent.amin(2, keepdim=True)  # of the bounds, nonnegative
    return torch.stack(
        [
            (alpha - bound).clamp(min=0).amax(),
            alpha.sum(2).abs().amax(),
            ((bound - alpha) * multipliers).abs().amax(),
        ]
    ).amax()


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"C": 100.0},
        {"C": 1e-3},
        {"damping": 0.0},
        {"ways": 5, "shots": 1},
        {"ways": 2, "shots": 10, "features": 3},
        {"spread": 1e3},
        {"spread": 1e-3},
        {"spread": 0.0},  # all examples of a class are equal
        slow({"ways": 20, "shots": 5, "tasks": 1, "features": 64}),
        slow({"ways": 5, "shots": 15, "features": 1600}),
    ],
    ids=str,
)
def test_solutions_satisfy_the_conditions_of_optimality(kind):
    x, dual = problem(**kind)
    alpha = solve("solve", dual(x.requires_grad_()))
    assert torch.autograd.grad(alpha.sin().sum(), x)[0].isfinite().all()
    assert residual(dual(x), alpha) < 1e-9


def test_derivatives_are_those_of_finite_differences():
    x, dual = problem(tasks=2, ways=3, shots=1, features=3)
    x.requires_grad_()
    loss = lambda x: (solve("solve", dual(x)) * torch.linspace(-1, 1, 18).view(2, 3, 3).double()).sin().sum()  # noqa: E731
    assert torch.autograd.gradcheck(loss, x)
    assert torch.autograd.gradgradcheck(loss, x)


def test_active_bounds_that_the_solver_mistook_are_corrected(monkeypatch):
    x, dual = problem()
    expected = solve("solve", dual(x))
    solve_one = crammer_singer._solve_one

    def mistaken(*arguments):
        active = solve_one(*arguments)
        active[0, 1] ^= True
        return active

    monkeypatch.setattr(crammer_singer, "_solve_one", mistaken)
    torch.testing.assert_close(solve("solve", dual(x)), expected, rtol=1e-12, atol=1e-12)


def support(*points):
    return torch.tensor([points], dtype=torch.float64), torch.arange(len(points)).unsqueeze(0)


def test_a_solution_without_a_derivative_is_refused():
    x, y = support([1.0, 0.0], [0.0, 1.0])
    at_its_kink = mg.MetaOptNet(
        nn.Identity(), C=0.5, damping=0.0
    )  # whose bounds are where the optimum is without
    with torch.no_grad():
        weight = at_its_kink.adapt((x, y)).params["weight"]
    torch.testing.assert_close(weight, torch.tensor([[[0.5, -0.5], [-0.5, 0.5]]], dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"^MetaOptNet\(batch\): .* task 0 has no derivative: a bound is active"
    ):
        at_its_kink.adapt((x.requires_grad_(), y))


def test_embeddings_that_depend_on_each_other_need_damping():
    x, y = support([1.0, 1.0], [2.0, 2.0])
    assert mg.MetaOptNet(nn.Identity()).adapt((x, y)).params["weight"].isfinite().all()
    with pytest.raises(
        ValueError, match=r"^MetaOptNet\(batch\): .* task 0 has no solution .* larger damping"
    ):
        mg.MetaOptNet(nn.Identity(), C=10.0, damping=0.0).adapt((x, y))


def test_without_the_solver_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "clarabel", None)
    example = support([1.0, 0.0], [0.0, 1.0])
    with pytest.raises(
        ImportError, match=r"^MetaOptNet\(batch\): .* pip install 'metagrad\[qp\]', or take head"
    ):
        mg.MetaOptNet(nn.Identity()).adapt(example)
    mg.MetaOptNet(nn.Identity(), head="ridge").adapt(example)


def test_vmap_is_refused():
    x, y = support([1.0, 0.0], [0.0, 1.0])
    head = mg.MetaOptNet(nn.Identity())
    labels = F.one_hot(y, 2).double()
    with pytest.raises(RuntimeError, match=r"^MetaOptNet\(batch\): .*torch.vmap cannot pass through it"):
        torch.vmap(lambda x: head.fit(x, labels)["weight"])(x.unsqueeze(0))
