"""Solves whose damping grows until the Hessian is positive definite."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import metagrad as mg
from metagrad import hypergrad
from metagrad.curvature import SolveError
from metagrad.hypergrad.problem import Problem

CURVATURES = torch.tensor([3.0, 1.0, -1.5], dtype=torch.float64)
METHODS = {
    "cg": hypergrad.CG(steps=3, damping=0.25),
    "exact": hypergrad.Exact(damping=0.25),
    "neumann": hypergrad.Neumann(steps=400, damping=0.25, scale=0.5),
}


def problem():
    """Return a saddle, whose Hessian is diagonal: an outer loss of slopes 1, 2, 3, a mixed derivative of -1."""
    slopes = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return Problem(
        lambda p, h: slopes @ p["x"],
        lambda p, h: (CURVATURES * p["x"].square()).sum() / 2 - h["lam"] @ p["x"],
        {"x": torch.ones(3, dtype=torch.float64)},
        {"lam": torch.zeros(3, dtype=torch.float64)},
    )


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_damping_grows_until_the_hessian_is_positive_definite(method):
    estimate = hypergrad.AdaptiveDamping(method, factor=4.0).estimate(problem())
    assert estimate.carry.damping == 4.0  # 1/4, 1 and 4; the least eigenvalue is -3/2
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) / (CURVATURES + 4)
    torch.testing.assert_close(estimate.gradient[0], expected, rtol=1e-9, atol=1e-12)


def test_a_loop_goes_on_with_the_damping_that_was_enough():
    called = []

    @dataclasses.dataclass(frozen=True)
    class Watched(hypergrad.CG):
        def inverse(self, operator, b):
            called.append(self.damping)
            return super().inverse(operator, b)

    at = problem()
    mg.bilevel(
        at.outer_loss,
        at.inner_loss,
        at.params,
        at.hyper,
        inner=mg.optim.rules.sgd(lr=0.0),
        outer=mg.optim.rules.sgd(lr=0.1),
        steps=2,
        inner_steps=1,
        method=hypergrad.AdaptiveDamping(Watched(steps=3, damping=0.25)),
    )
    assert called == [0.25, 1.0, 4.0, 4.0]


def test_after_all_tries_a_solve_fails_as_it_does():
    at = problem()
    with pytest.raises(SolveError, match="not positive definite"):
        mg.hypergradient(
            at.outer_loss,
            at.inner_loss,
            at.params,
            at.hyper,
            method=hypergrad.AdaptiveDamping(METHODS["cg"], tries=2),
        )


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        (hypergrad.FirstOrder(), {}, TypeError, r"AdaptiveDamping\(method\): expected CG, Neumann or Exact"),
        (hypergrad.CG(), {}, ValueError, r"AdaptiveDamping\(method\): its damping is 0, which does not grow"),
        (
            METHODS["cg"],
            {"factor": 1.0},
            ValueError,
            r"AdaptiveDamping\(..., factor\): expected a number above 1, got 1.0",
        ),
        (
            METHODS["cg"],
            {"tries": 0},
            ValueError,
            r"AdaptiveDamping\(..., tries\): expected an int of 1 or more, got 0",
        ),
    ],
)
def test_wrong_arguments_are_errors(method, options, error, message):
    with pytest.raises(error, match=message):
        hypergrad.AdaptiveDamping(method, **options)


def test_first_order_darts_takes_one_gradient_and_leaves_the_inner_loss_alone():
    at = problem()

    def unused(params, hyper):
        raise AssertionError("the inner loss was evaluated")

    at = dataclasses.replace(at, inner_loss=unused, outer_loss=lambda p, h: h["lam"].sum() + p["x"].sum())
    (gradient,) = hypergrad.FiniteDifference(lr=0.0).estimate(at).gradient
    torch.testing.assert_close(gradient, torch.ones(3, dtype=torch.float64))
