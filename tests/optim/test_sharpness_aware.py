"""Sharpness-aware minimization: gradients at both orders, and errors."""

import pytest
import torch

import metagrad as mg
from metagrad.optim import sharpness_aware


def loss_fn(params, scale=1.0):
    return scale * (params["a"].exp().sum() * params["b"].square().sum()).sin()


@pytest.fixture
def params():
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, dtype=torch.float64, requires_grad=True),
        "b": torch.randn(2, 2, dtype=torch.float64, requires_grad=True),
    }


def by_hand(params, rho):
    """Return the loss and its gradient in the neighbor uphill, in plain torch."""
    gradient = torch.autograd.grad(loss_fn(params), list(params.values()))
    norm = sum(part.square().sum() for part in gradient).sqrt()
    moved = [
        (p + rho * part / norm).detach().requires_grad_()
        for p, part in zip(params.values(), gradient, strict=True)
    ]
    loss = loss_fn(dict(zip(params, moved, strict=True)))
    return loss, torch.autograd.grad(loss, moved)


def test_order_one_is_the_gradient_of_the_neighbor(params):
    loss, gradient = by_hand(params, 0.1)
    found = sharpness_aware(loss_fn, params, rho=0.1)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    parts = torch.autograd.grad(found, list(params.values()))
    torch.testing.assert_close(parts, gradient, rtol=1e-9, atol=1e-12)


def test_order_two_is_the_derivative_of_the_formula(params):
    rho = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def fn(a, b, rho):
        return sharpness_aware(loss_fn, {"a": a, "b": b}, rho=rho, order=2)

    assert mg.gradcheck(fn, (*params.values(), rho), order=2)


@pytest.mark.parametrize("order", [1, 2])
def test_at_a_stationary_point_it_is_the_loss(order):
    w = torch.zeros(3, requires_grad=True)
    loss = sharpness_aware(lambda p: 1 + p["w"].square().sum(), {"w": w}, order=order)
    assert loss.item() == 1
    assert torch.equal(torch.autograd.grad(loss, w)[0], torch.zeros(3))


def test_a_gradient_whose_norm_is_beyond_half_precision_leads_uphill():
    seen = []

    def loss_fn(params):
        seen.append(params["w"].detach())
        return (params["w"] * 20000).sum()

    sharpness_aware(loss_fn, {"w": torch.ones(25, dtype=torch.float16, requires_grad=True)}, rho=5.0)
    assert torch.equal(seen[-1], torch.full((25,), 2.0, dtype=torch.float16))


@pytest.mark.parametrize("rho", [torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5]), 0.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_number_keeps_its_dtype_and_shape_whatever_rho_has(rho, dtype):
    seen = []

    def loss_fn(params):
        seen.append(params["w"])
        return params["w"].square()

    w = torch.tensor(1.0, dtype=dtype, requires_grad=True)
    loss = sharpness_aware(loss_fn, {"w": w}, rho=rho)
    assert [(value.dtype, value.shape) for value in (*seen, loss)] == [(dtype, ())] * 3
    assert loss.item() == 2.25


def test_what_it_refuses(params):
    call = r"sharpness_aware\(loss_fn, params\): "
    with pytest.raises(ValueError, match=call + r"order must be 1 or 2, got 3\."):
        sharpness_aware(loss_fn, params, order=3)
    for rho in (-1.0, torch.ones(2), "large"):
        with pytest.raises(ValueError, match=call + "rho must be one number, at least 0, got "):
            sharpness_aware(loss_fn, params, rho=rho)
    with pytest.raises(ValueError, match=r"the loss does not depend on params\['c'\]"):
        sharpness_aware(loss_fn, {**params, "c": torch.zeros(1, requires_grad=True)})
    with pytest.raises(ValueError, match=call + r"params\['a'\] and params\['c'\] are one tensor"):
        sharpness_aware(lambda p: loss_fn(p) * p["c"].sum(), {**params, "c": params["a"]})
    table = torch.nn.Embedding(4, 2, sparse=True)
    with pytest.raises(TypeError, match=call + r"the gradient of params\['weight'\] is sparse"):
        sharpness_aware(lambda p: table(torch.tensor([1])).square().sum(), dict(table.named_parameters()))
