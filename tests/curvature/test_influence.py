"""Influence against dense matrices, closed forms of ridge regression, and training without an example."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.curvature.solvers.methods import CG
from metagrad.curvature.solvers.solution import SolveError
from tests.curvature.maps import drawn
from tests.curvature.operators.test_fisher import gradients

F64 = torch.float64


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data, queries = (drawn(14, 4), torch.arange(14) % 3), (drawn(3, 4, seed=2), torch.tensor([2, 0, 1]))
    return model, dict(model.named_parameters()), data, queries


def dense(model, params, data, queries, damping, loss_fn=F.cross_entropy):
    with mg.ggn(model, loss_fn, params, data) as G:
        inverse = torch.linalg.inv(G.to_dense() + damping * torch.eye(G.shape[0], dtype=F64))
    own, scale = gradients(model, loss_fn, *data), len(data[0])
    return gradients(model, loss_fn, *queries) @ inverse @ own.T / scale, inverse


def test_scores_are_products_with_the_dense_inverse():
    model, params, data, queries = made()
    expected, _ = dense(model, params, data, queries, 0.01)
    K = mg.kfac(model, F.cross_entropy, params, data, fisher="exact")
    for options in (
        {"method": "exact"},
        {"max_steps": 200},
        {"max_steps": 200, "preconditioner": K},
        {"method": CG()},
    ):
        found = mg.influence(
            model, F.cross_entropy, params, data, queries, damping=0.01, **{"max_steps": 200, **options}
        )
        torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-6)
        assert float(found.residual.max()) < 1e-5
    assert torch.equal(found.top(2), expected.topk(2).indices)
    by_k = (
        gradients(model, F.cross_entropy, *queries)
        @ K.inverse(0.01)(gradients(model, F.cross_entropy, *data)).T
        / 14
    )
    found = mg.influence(
        model, F.cross_entropy, params, data, queries, damping=0.01, method="kfac", preconditioner=K
    )
    torch.testing.assert_close(found.scores, by_k, rtol=1e-10, atol=1e-12)
    assert float(found.residual.min()) > 0.01


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_and_functions_equal_the_whole(reduction):
    model, params, (x, y), (qx, qy) = made()

    def loss_fn(z, y):
        return F.cross_entropy(z, y, reduction=reduction)

    def measured(params):
        z = torch.func.functional_call(model, params, (qx,))
        return F.cross_entropy(z, qy, reduction="none")

    def scores(train, queries):
        return mg.influence(model, loss_fn, params, train, queries, damping=0.01, method="exact").scores

    parts = [(x[:5], y[:5]), (x[5:], y[5:])]
    whole = scores((x, y), (qx, qy))
    for train, queries in (
        (parts, (qx, qy)),
        ((x, y), [(qx[:1], qy[:1]), (qx[1:], qy[1:])]),
        ((x, y), measured),
    ):
        torch.testing.assert_close(scores(train, queries), whole, rtol=1e-10, atol=1e-13)
    own = scores((x, y), (x, y)).diagonal()
    for train in ((x, y), parts):
        torch.testing.assert_close(scores(train, None), own, rtol=1e-10, atol=1e-13)
    if reduction == "mean":
        torch.testing.assert_close(
            whole, dense(model, params, (x, y), (qx, qy), 0.01)[0], rtol=1e-9, atol=1e-12
        )


def test_positions_of_an_example_add_up():
    model, params, *_ = made()
    x, y = drawn(6, 2, 4), torch.arange(12).reshape(6, 2) % 3

    def loss_fn(z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    expected, _ = dense(model, params, (x, y), (x[:2], y[:2]), 0.01, loss_fn)
    found = mg.influence(model, loss_fn, params, (x, y), (x[:2], y[:2]), damping=0.01, method="exact")
    torch.testing.assert_close(found.scores, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_example_is_its_own_query_with_class_weights_and_ignored_positions(reduction):
    """The loss of a query is a mean over its own positions, which differ in number and in weight."""
    model, params, *_ = made()
    x, y = drawn(6, 2, 4), torch.arange(12).reshape(6, 2) % 3
    y[1, 0] = y[2, 1] = -100
    weight = torch.tensor([0.5, 1.0, 4.0], dtype=F64)

    def loss_fn(z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=weight, reduction=reduction)

    for data in ((x, y), [(x[:4], y[:4]), (x[4:], y[4:])]):
        own, pairs = (
            mg.influence(model, loss_fn, params, data, queries, damping=0.1, method="exact").scores
            for queries in (None, (x, y))
        )
        torch.testing.assert_close(own, pairs.diagonal(), rtol=1e-9, atol=1e-12)
    ignored = torch.full_like(y, -100).where(torch.arange(6).unsqueeze(1) == 0, y)
    assert mg.influence(model, loss_fn, params, (x, ignored), damping=0.1, method="exact").scores[0] == 0


def test_leaving_an_example_out_of_a_ridge_regression():
    """The prediction without an example changes by the score over 1 - h, with the leverage h."""
    x, y, penalty, query = drawn(30, 4), drawn(30, seed=2), 0.3, drawn(2, 4, seed=3)

    def fitted(x, y):  # of a sum over examples, whose other terms keep their weights
        return torch.linalg.solve(x.T @ x + penalty * torch.eye(4, dtype=F64), x.T @ y)

    def model(params, x):
        return x @ params["w"]

    def loss_fn(z, y):
        return F.mse_loss(z, y, reduction="sum")

    params = {"w": fitted(x, y)}
    found = mg.influence(
        model, loss_fn, params, (x, y), lambda p: query @ p["w"], damping=2 * penalty, method="exact"
    )
    leverage = ((x @ torch.linalg.inv(x.T @ x + penalty * torch.eye(4, dtype=F64))) * x).sum(1)
    others = [torch.arange(30) != n for n in range(30)]
    actual = torch.stack([query @ (fitted(x[kept], y[kept]) - params["w"]) for kept in others], 1)
    torch.testing.assert_close(found.scores / (1 - leverage), actual, rtol=1e-9, atol=1e-12)


def test_what_cannot_be_answered_is_an_error():
    model, params, data, queries = made()
    K = mg.kfac(model, F.cross_entropy, {"0.weight": params["0.weight"]}, data)
    options = {"damping": 0.01}

    def run(queries=queries, params=params, **more):
        return mg.influence(model, F.cross_entropy, params, data, queries, **{**options, **more})

    with pytest.raises(ValueError, match="preconditioner: expected an operator on ParameterSpace"):
        run(preconditioner=K)
    with pytest.raises(TypeError, match='method="kfac" needs preconditioner: expected an operator of kfac'):
        run(method="kfac")
    with pytest.raises(ValueError, match="queries: expected a function of the parameters that returns"):
        run(lambda p: torch.zeros(3))
    with pytest.raises(ValueError, match="queries: expected a first axis of examples"):
        run((queries[0][0], queries[1][0]))
    assert repr(run(damping=1.0)).startswith("InfluenceScores(scores=[")
    with pytest.raises(SolveError, match="not positive definite"):
        run(damping=0.0, method="exact")
    normed = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match="normalizes by the batch"):
        mg.influence(normed, F.cross_entropy, dict(normed.named_parameters()), data, queries, damping=0.1)
    random = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    with pytest.raises(ValueError, match=r"'1' draws random numbers: expected model.eval\(\)"):
        mg.influence(random, F.cross_entropy, dict(random.named_parameters()), data, queries, damping=0.1)
    own = dict(random.named_parameters())
    found = mg.influence(random.eval(), F.cross_entropy, own, data, queries, damping=0.1)
    assert found.scores.isfinite().all()
