"""Hessians of several losses against dense ones of each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metagrad.curvature import Result, hessians

ROWS, SIZE = 3, 4


@pytest.fixture
def params():
    """Return stacked parameters of two names."""
    return {
        name: torch.randn(ROWS, *shape, dtype=torch.float64).requires_grad_()
        for name, shape in {"a": (SIZE - 1,), "b": ()}.items()
    }


def losses_of(params, scale=1.0):
    return (
        (params["a"].sin() * params["b"][..., None] * scale).sum(-1)
        + (params["a"] ** 4).sum(-1) / 8
        + params["b"] ** 2
    )


def dense(params, scale=1.0):
    """Return the Hessian of each row, [rows, n, n]."""

    def loss(row):
        return losses_of({"a": row[:-1], "b": row[-1]}, scale)

    rows = torch.cat([params["a"], params["b"][:, None]], 1)
    return torch.stack([torch.func.hessian(loss)(row) for row in rows])


def test_products_and_gradients_are_those_of_each_row(params):
    vectors = torch.randn(ROWS, SIZE, dtype=torch.float64)
    with hessians(losses_of(params), params) as H:
        found = H.products(vectors)
        expected = (dense(params) @ vectors[:, :, None])[:, :, 0]
        torch.testing.assert_close(found, expected)
        assert not found.requires_grad
        slopes = [torch.autograd.grad(losses_of(params)[i], params["a"])[0][i] for i in range(ROWS)]
        torch.testing.assert_close(H.unflatten(H.gradient)["a"], torch.stack(slopes))
        assert repr(H) == "Hessians(3 of shape (4, 4), dtype=torch.float64)"
    with pytest.raises(ValueError, match="closed, and the graph is freed"):
        H.products(vectors)


def test_products_can_be_differentiated(params):
    vectors = torch.randn(ROWS, SIZE, dtype=torch.float64)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    with hessians(losses_of(params, scale), params, create_graph=True) as H:
        found = (H.products(vectors).square().sum() + H.gradient.square().sum(), [scale, params["a"]])
    expected = (dense(params, scale) @ vectors[:, :, None]).square().sum()
    slopes = torch.autograd.grad(losses_of(params, scale).sum(), list(params.values()), create_graph=True)
    expected = expected + sum(slope.square().sum() for slope in slopes)
    torch.testing.assert_close(torch.autograd.grad(*found), torch.autograd.grad(expected, found[1]))


def test_every_row_is_solved_by_itself(params):
    b = torch.randn(ROWS, SIZE, dtype=torch.float64)
    with hessians(losses_of(params), params) as H:
        found = H.solve(b, damping=5.0, rtol=1e-12)
    damped = dense(params) + 5 * torch.eye(SIZE, dtype=torch.float64)
    torch.testing.assert_close(found.value, torch.linalg.solve(damped, b), rtol=1e-9, atol=1e-12)


def test_a_row_that_is_not_finite_stays_alone():
    x = torch.tensor([[1.0], [0.0], [4.0]], requires_grad=True)
    with hessians(x.sqrt().sum(1), {"x": x}) as H:
        assert H.gradient.isfinite().all(1).tolist() == [True, False, True]
        results = H.solve(torch.ones(3, 1), damping=1.0).stats.results
    assert [one is Result.NON_FINITE for one in results] == [False, True, False]


def coupled(params):
    normed = nn.functional.batch_norm(params["a"], None, None, training=True)
    return normed.square().sum(1) * params["b"]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            lambda p: losses_of(p).sum(),
            r"hessians\(losses, params\): expected one loss for each row, \[k\], got \(\)",
        ),
        (
            lambda p: losses_of(p)[:2],
            r"there are 2 losses, so parameters must be \[2, ...\], but 'a' is \(3, 3\)",
        ),
        (lambda p: losses_of(p).detach(), "with a graph"),
        (coupled, "the losses depend on each other's rows of 'a'"),
        (lambda p: p["b"] ** 2, "does not depend on"),
    ],
)
def test_bad_input_is_refused(params, losses, message):
    with pytest.raises(ValueError, match=message):
        hessians(losses(params), params)


def test_vectors_are_one_for_each_loss(params):
    with (
        hessians(losses_of(params), params) as H,
        pytest.raises(
            ValueError, match=r"hessians.products\(vectors\): expected one row for each loss, \[3, 4\]"
        ),
    ):
        H.products(torch.ones(2, SIZE, dtype=torch.float64))
