"""Operators are used where nothing else is differentiated: under no_grad, which is where training code steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from tests.marks import combined


def operator(kind, mode, data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    params = dict(model.named_parameters())

    def loss_fn(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    if kind == "hessian":
        return mg.hessian(loss_fn, params, data, mode=mode)
    return getattr(mg, kind)(model, F.cross_entropy, params, data, mode=mode)


@pytest.mark.parametrize("batches", [False, True], ids=["one batch", "batches"])
@pytest.mark.parametrize(
    ("kind", "mode"),
    combined(
        ["hessian", "ggn", "fisher"],
        ["reverse", "forward"],
        fast=lambda *values: values in [("hessian", "reverse"), ("ggn", "forward")],
    ),
)
def test_products_do_not_depend_on_grad_mode(kind, mode, batches):
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 2, generator=draw, dtype=torch.float64), torch.arange(6) % 3
    data = [(x[:2], y[:2]), (x[2:], y[2:])] if batches else (x, y)
    with operator(kind, mode, data) as H:
        expected = H.to_dense()
    with torch.no_grad(), operator(kind, mode, data) as H:  # all of it
        torch.testing.assert_close(H.to_dense(), expected)
        torch.testing.assert_close(H["2"].to_dense(), expected[-15:, -15:])
    with operator(kind, mode, data) as H, torch.no_grad():  # the products alone
        torch.testing.assert_close(H["2"].to_dense(), expected[-15:, -15:])
        torch.testing.assert_close(H.to_dense(), expected)
        b = torch.ones(H.shape[0], dtype=torch.float64)
        solution = H.solve(b, method="cg", damping=0.5).value
    torch.testing.assert_close(expected @ solution + 0.5 * solution, b, rtol=1e-5, atol=1e-5)
