"""Every optimizer descends."""

import math

from tests.optim.torch_optim.cases import (
    classification,
    every_one,
    layer,
    network,
    optimizer,
    rosenbrock,
    run,
    steps_of,
)


@every_one
def test_on_a_network(case):
    model = network()
    losses = run(optimizer(case, model), classification(model), steps_of(case, 40))
    assert losses[-1] < 0.75 * losses[0]


@every_one
def test_at_its_defaults_no_optimizer_climbs(case):
    model = layer(-1.2, 1.0)
    losses = run(case.of(model), lambda: rosenbrock(model), steps_of(case, 50))
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
