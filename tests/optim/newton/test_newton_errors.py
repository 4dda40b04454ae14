"""What second-order rules refuse, and how they say it."""

from __future__ import annotations

import pytest
import torch

from metagrad.optim.curvature import KnownDiagonal
from metagrad.optim.newton.cubic_newton import cubic_newton
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.lbfgs import lbfgs
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.newton.trust_region_newton import trust_region_newton
from metagrad.optim.objective import TapeObjective
from metagrad.optim.tape_curvature import TapeCurvature
from metagrad.sparse.tables.row_sparse import RowSparse

RULES = [newton_cg, gauss_newton, natural_gradient, cubic_newton, trust_region_newton, lbfgs]
every = pytest.mark.parametrize("make", RULES)
WITH_CURVATURE = RULES[:-1]


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (newton_cg, {"lr": -1.0}, r"newton_cg\(...\): lr must be at least 0, got -1.0"),
        (newton_cg, {"damping": -1.0}, r"newton_cg\(...\): damping must be at least 0"),
        (
            newton_cg,
            {"warm_start": {"w": 1.0}},
            r"newton_cg\(...\): warm_start is one number for all parameters",
        ),
        (newton_cg, {"damping": torch.ones(2, 2)}, "damping must be a scalar, or 1-d"),
        (newton_cg, {"change": 1.0}, r"newton_cg\(...\): change must be above 1, got 1.0"),
        (newton_cg, {"rtol": 0.0}, r"newton_cg\(...\): rtol must be between 0 and 1, got 0.0"),
        (newton_cg, {"progress": 0.0}, r"newton_cg\(...\): progress must be above 0, or None"),
        (newton_cg, {"max_steps": 0}, r"newton_cg\(...\): max_steps must be a whole number of at least 1"),
        (gauss_newton, {"max_steps": True}, r"gauss_newton\(...\): max_steps must be a whole number"),
        (natural_gradient, {"max_divergence": 0.0}, "max_divergence must be above 0, got 0.0"),
        (cubic_newton, {"cubic": 0.0}, r"cubic_newton\(...\): cubic must be above 0, got 0.0"),
        (cubic_newton, {"rtol": 1.0}, r"cubic_newton\(...\): rtol must be between 0 and 1"),
        (trust_region_newton, {"radius": 0.0}, "radius must be above 0, got 0.0"),
        (trust_region_newton, {"max_radius": 0.0}, "max_radius must be above 0, got 0.0"),
        (trust_region_newton, {"boundary_steps": -1}, "boundary_steps must be at least 0, got -1"),
        (trust_region_newton, {"accept": 0.25}, "accept must be from 0 to below 1/4, got 0.25"),
        (
            lbfgs,
            {"history_size": 0},
            r"lbfgs\(...\): history_size must be a whole number of at least 1, got 0",
        ),
        (lbfgs, {"max_eval": 1.5}, "max_eval must be a whole number"),
        (lbfgs, {"line_search_fn": "armijo"}, 'line_search_fn must be "strong_wolfe" or None'),
    ],
)
def test_hyperparameters_out_of_their_range(make, options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        make(**options)


@every
def test_parameters_that_are_no_vector(make):
    with pytest.raises(TypeError, match=r"'z' is torch.complex64, and must be real"):
        make().init({"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(
        ValueError, match=r"all parameters make one vector, but 'a' is torch.float32 on cpu and 'b'"
    ):
        make().init({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)})


@every
def test_gradients_that_are_missing_or_sparse(make):
    rule, params = make(), {"w": torch.zeros(3, 2)}
    state = rule.init(params)
    with pytest.raises(ValueError, match="there is no gradient of 'w'"):
        rule.update({}, state, params, KnownDiagonal({}))
    rows = RowSparse(torch.tensor([1]), torch.ones(1, 2), (3, 2))
    with pytest.raises(TypeError, match="the gradient of 'w' is RowSparse"):
        rule.update({"w": rows}, state, params, KnownDiagonal({}))


@pytest.mark.parametrize("make", WITH_CURVATURE)
def test_no_curvature(make):
    rule, params = make(), {"w": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"this step needs curvature, and got None.*TapeObjective"):
        rule.update({"w": torch.ones(2)}, rule.init(params), params)


@pytest.mark.parametrize("make", [newton_cg, cubic_newton, trust_region_newton])
def test_a_curvature_that_cannot_evaluate(make):
    rule, params = make(), {"w": torch.ones(2, requires_grad=True)}
    (g,) = torch.autograd.grad(params["w"].pow(2).sum(), params["w"], create_graph=True)
    curvature = TapeCurvature(params, {"w": g})
    with pytest.raises(TypeError, match=r"TapeCurvature has no evaluate\(params\).*or set adapt=False"):
        rule.update({"w": g}, rule.init(params), params, curvature)
    new, _ = make(adapt=False).update({"w": g}, rule.init(params), params, curvature)
    assert new["w"].detach().norm() < 2**0.5


def test_a_curvature_without_a_fisher_matrix():
    rule, params = natural_gradient(adapt=False), {"w": torch.ones(2)}
    with pytest.raises(TypeError, match=r"KnownDiagonal has no fisher_products\(v\)"):
        rule.update({"w": torch.ones(2)}, rule.init(params), params, KnownDiagonal({}))


def test_a_line_search_without_a_loss():
    rule, params = lbfgs(line_search_fn="strong_wolfe"), {"w": torch.ones(2)}
    with pytest.raises(ValueError, match=r"the loss is needed at other parameters.*line_search_fn=None"):
        rule.update({"w": torch.ones(2)}, rule.init(params), params)
    with pytest.raises(TypeError, match=r"no evaluate\(params\).*or set line_search_fn=None"):
        rule.update({"w": torch.ones(2)}, rule.init(params), params, KnownDiagonal({}))
    assert rule.needs_curvature(0)
    assert not lbfgs().needs_curvature(0)


def test_a_loss_of_unknown_form():
    rule, params = gauss_newton(), {"w": torch.ones(2, requires_grad=True)}
    objective = TapeObjective(lambda p: p["w"].pow(2).sum(), params)
    with pytest.raises(ValueError, match="the Gauss-Newton matrix needs a loss of known form"):
        rule.update(objective.grads, rule.init(params), params, objective)


@every
def test_no_parameters_no_step(make):
    rule = make()
    params, state = rule.update({}, rule.init({}), {})
    assert params == {}
    assert state.step == 1


def test_the_objective_of_a_complex_loss_is_refused_here_and_elsewhere():
    params = {"w": torch.ones(2, requires_grad=True)}
    with pytest.raises(
        ValueError, match=r"TapeObjective\(\.\.\.\): the loss must be real, got torch.complex64"
    ):
        TapeObjective(lambda p: p["w"].sum() * 1j, params)
    one = TapeObjective(lambda p: p["w"].sum() * (1 if p["w"] is params["w"] else 1j), params)
    for look in (one.evaluate, one.gradient):
        with pytest.raises(ValueError, match="the loss must be real"):
            look({"w": torch.zeros(2)})
