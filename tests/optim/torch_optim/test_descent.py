"""Every optimizer descends."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.marks import slow
from tests.optim.torch_optim.cases import (
    classification,
    every_one,
    layer,
    network,
    optimizer,
    quadratic,
    rosenbrock,
    run,
    steps_of,
)


@pytest.mark.slow
@every_one
def test_on_a_convex_quadratic(case):
    model = layer(-1.0, 3.0)
    losses = run(
        case.of(model, **case.options, **case.quadratic), lambda: quadratic(model), steps_of(case, 150)
    )
    assert losses[-1] < 1e-2 * losses[0]


@pytest.mark.slow
@every_one
def test_on_rosenbrock(case):
    model = layer(-1.2, 1.0)
    losses = run(
        case.of(model, **case.options, **case.rosenbrock), lambda: rosenbrock(model), steps_of(case, 600)
    )
    assert losses[-1] < 0.1 * losses[0]


@every_one
def test_on_a_network(case):
    model = network()
    losses = run(optimizer(case, model), classification(model), steps_of(case, 100))
    assert losses[-1] < 0.5 * losses[0]


def separable(one):
    """A logistic regression whose infimum, 0, is at infinity."""
    x = torch.tensor([[1.0, 0.5], [2.0, -1.0], [-1.0, 0.2], [-0.5, -2.0]])
    return F.binary_cross_entropy_with_logits(one(x), torch.tensor([[1.0], [1.0], [0.0], [0.0]]))


@every_one
@pytest.mark.parametrize("problem", [rosenbrock, slow(separable)])
def test_at_its_defaults_nobody_climbs_or_ends_at_nan(case, problem):
    model = layer(-1.2, 1.0)
    losses = run(case.of(model), lambda: problem(model), steps_of(case, 50))
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
