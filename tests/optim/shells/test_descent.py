"""Every optimizer descends."""

from __future__ import annotations

import pytest
import torch

from tests.optim.shells.cases import classification, every, network, quadratic, rosenbrock, run


def start(*values):
    return torch.tensor([values], requires_grad=True)


@every
@pytest.mark.parametrize("foreach", [None, True, False])
def test_on_a_convex_quadratic(case, foreach):
    w = start(-1.0, 3.0)
    options = {"foreach": foreach} if case.elementwise else {}
    losses = run(case.make([w], **case.options, **case.quadratic, **options), lambda: quadratic(w), 150)
    assert losses[-1] < 1e-2 * losses[0]


@every
def test_on_rosenbrock(case):
    w = start(-1.2, 1.0)
    losses = run(case.make([w], **case.options, **case.rosenbrock), lambda: rosenbrock(w), 300)
    assert losses[-1] < 0.1 * losses[0]


@every
def test_on_a_network(case):
    model = network()
    opt = case.make(model.parameters(), **case.options, **case.network)
    losses = run(opt, classification(model), 100)
    assert losses[-1] < 0.5 * losses[0]
