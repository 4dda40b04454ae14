"""The Hessian of every layer against finite differences of the gradient, or its error."""

import functools

import pytest
import torch

import metagrad as mg
from metagrad.curvature.operators.hessian import hessian
from metagrad.curvature.operators.space import ParameterSpace
from tests.curvature.layers import cases

CASES = {case.name: case for case in cases()}

# The gradient of torch.cdist has a derivative from torch 2.14 on.
DISTANCES = {"cdist"} if torch.__version__ < "2.14" else set()
REFUSED = {"attention flash", "Hardsigmoid()", "multi_margin_loss", "ctc_loss", "EmbeddingBag", *DISTANCES}


def differences(fn, point, vector, h=1e-5):
    """The derivative along a vector, of fourth order in h."""
    ahead, behind = (fn(point + h * vector), fn(point - h * vector))
    far_ahead, far_behind = fn(point + 2 * h * vector), fn(point - 2 * h * vector)
    return (8 * (ahead - behind) - (far_ahead - far_behind)) / (12 * h)


def directions(space):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, space.size, dtype=torch.float64, generator=generator)


@functools.cache
def expected_products(name):
    case = CASES[name]
    space = ParameterSpace(case.params)

    def gradient(point):
        torch.manual_seed(0)
        point = point.detach().requires_grad_()
        loss = case.loss_fn(space.unflatten(point), *case.batch)
        return torch.autograd.grad(loss, point)[0]

    return torch.stack([differences(gradient, space.flatten(case.params), v) for v in directions(space)])


@pytest.mark.parametrize("names", [list(CASES)[i::6] for i in range(6)], ids=range(6))
def test_second_and_third_derivatives_of_every_layer(names):
    for name in names:
        check_layer(name)


def check_layer(name):
    case = CASES[name]
    space = ParameterSpace(case.params)
    vectors = directions(space)
    params = {key: p.clone().requires_grad_() for key, p in case.params.items()}
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"derivative|order [23]|row-sparse"):
            hessian(case.loss_fn, params, case.batch).multiply(vectors)
        return
    expected, repeats = expected_products(name), 5  # as many as are computed together
    torch.manual_seed(0)
    with hessian(case.loss_fn, case.params, case.batch) as H:
        found = H.multiply(vectors.repeat(repeats, 1))
    scale = 1 + float(expected.abs().max())
    assert (found - expected.repeat(repeats, 1)).abs().max() <= 1e-7 * scale, name

    def contraction(point):
        torch.manual_seed(0)
        with hessian(case.loss_fn, space.unflatten(point), case.batch) as H:
            return (H @ vectors[0]).pow(3).sum()

    third = differences(contraction, space.flatten(case.params), vectors[1])
    torch.manual_seed(0)
    with hessian(case.loss_fn, params, case.batch, create_graph=True) as H:
        product = H @ vectors[0]
        assert H.gradient.requires_grad
        assert product.requires_grad or not third  # of a quadratic loss it is constant
        if third:
            found = mg.grad(product.pow(3).sum(), params, materialize_grads=True)
            assert abs(space.flatten(found) @ vectors[1] - third) <= 1e-4 * abs(third) + 1e-6, name
