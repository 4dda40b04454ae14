"""Readings of the curvature along updates, against quadratics and the Hessian, in loops that do not change."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.curvature import Sharpness

F64 = torch.float64
VALUES = torch.tensor([4.0, 1.0, 0.25], dtype=F64)


def quadratic(lr, steps=1, **options):
    w = torch.tensor([1.0, -2.0, 3.0], dtype=F64, requires_grad=True)

    def loss():
        return (VALUES * w**2).sum() / 2

    opt = torch.optim.SGD([w], lr=lr, momentum=0.5)
    with Sharpness(opt, loss, every=1, **options) as watch:
        for _ in range(steps):
            before = w.detach().clone()
            opt.zero_grad()
            loss().backward()
            opt.step()
    return watch, before, w.detach() - before


@pytest.mark.parametrize("lr", [0.01, 0.3, 0.9])
def test_a_quadratic_is_exact(lr):
    watch, w, d = quadratic(lr, 3, critical=True, top=True, trace=True)
    curved, slope = (VALUES * d * d).sum(), (VALUES * w * d).sum()
    found = watch.last
    assert len(watch.history) == found.step == 3
    assert found.loss == pytest.approx(float((VALUES * w * w).sum() / 2), rel=1e-14)
    assert found.slope == pytest.approx(float(slope), rel=1e-9)
    assert found.curvature == pytest.approx(float(curved / d.dot(d)), rel=1e-9)
    assert found.ratio == pytest.approx(float(-2 * slope / curved), rel=1e-9)
    assert found.critical == pytest.approx(found.ratio, rel=2**-11)  # twelve halvings
    assert found.top == pytest.approx(4.0, rel=1e-6)
    assert found.trace == pytest.approx(5.25, rel=1e-9)


def reading(params, lr, loss, **options):
    opt = torch.optim.SGD(params, lr=lr)
    with Sharpness(opt, loss, every=1, **options) as watch:
        loss().backward()
        opt.step()
    return watch.last


def test_a_loss_of_nan_counts_as_higher():
    w = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    found = reading([w], 0.5, lambda: -w.sum() + 0 * torch.log(10 - w).sum(), critical=True)
    assert found.critical == pytest.approx(18, rel=2**-11)  # where the logarithm ends


def test_without_curvature_there_is_no_critical_step():
    w = torch.ones(2, dtype=F64, requires_grad=True)
    found = reading([w], 0.1, lambda: -(w**2).sum(), critical=True)
    assert (found.ratio, found.critical) == (math.inf, math.inf)
    assert found.curvature == pytest.approx(-2)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    parts = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)]
    return nn.Sequential(*parts).to(dtype)


def trained(every, dtype=torch.float32, make=torch.optim.Adam):
    net = network(dtype)
    x, y = torch.randn(30, 6, dtype=dtype), torch.arange(30) % 3
    opt = make(net.parameters(), lr=0.03)

    def loss():
        return F.cross_entropy(net(x), y)

    watch = Sharpness(opt, loss, every=every, critical=True, top=True) if every else None
    for _ in range(7):
        opt.zero_grad()
        loss().backward()
        opt.step()
    return [*net.state_dict().values(), torch.rand(3)], watch


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_the_loop_ends_at_the_same_bits(make):
    plain, _ = trained(0, make=make)
    watched, watch = trained(3, make=make)
    assert [reading.step for reading in watch.history] == [1, 4, 7]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_the_curvature_is_that_of_the_hessian():
    """The error of a difference of losses is at most a thousandth and the rounding that the reading states."""
    for dtype in (F64, torch.float32):
        net = network(dtype).eval()
        x, y = torch.randn(30, 6, dtype=dtype), torch.arange(30) % 3
        opt = torch.optim.SGD(net.parameters(), lr=0.02)

        def loss(net=net, x=x, y=y):
            return F.cross_entropy(net(x), y)

        with Sharpness(opt, loss, every=1) as watch:
            loss().backward()
            params = dict(net.named_parameters())
            before = {key: p.detach().clone() for key, p in params.items()}
            with mg.hessian(loss(), params) as H:
                opt_d = {key: -0.02 * p.grad for key, p in params.items()}
                d = H.space.flatten(opt_d)
                expected = float(d.dot(H @ d) / d.dot(d))
            opt.step()
        assert all(not torch.equal(before[key], p) for key, p in params.items())
        assert abs(watch.last.curvature - expected) < 1e-3 * abs(expected) + watch.last.rounding
        assert watch.last.rounding * 4 < abs(expected)


def test_readings_work_with_fused_attention():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    found = reading([q], 0.5, lambda: F.scaled_dot_product_attention(q, q, q).square().sum())
    assert math.isfinite(found.curvature)


def test_a_difference_below_the_rounding_error_is_nan_and_a_step_that_moves_nothing_has_no_reading():
    w = torch.ones(2, requires_grad=True)
    opt = torch.optim.SGD([w], lr=1e-6)
    with Sharpness(opt, lambda: 1e3 + (w**2).sum(), every=1) as watch:
        (w**2).sum().backward()
        opt.step()
        opt.zero_grad()
        opt.step()
    (reading,) = watch.history
    assert repr(watch) == f"Sharpness(every 1 steps, 1 readings, last=[{reading}])"
    assert math.isnan(reading.curvature)
    assert math.isnan(reading.ratio)
    opt.step()
    assert len(watch.history) == 1


@pytest.mark.parametrize(("lr", "is_finite"), [(1e-2, False), (0.5, True)])
def test_under_autocast_the_rounding_error_is_that_of_half_precision(lr, is_finite):
    found = []
    for is_half in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        x, y = torch.randn(300, 6), torch.arange(300) % 3

        @torch.autocast("cpu", torch.bfloat16, is_half)
        def loss(net=net, x=x, y=y):
            return F.cross_entropy(net(x), y)

        found.append(reading(net.parameters(), lr, loss))
    half, exact = found
    assert math.isfinite(half.curvature) == is_finite
    assert not is_finite or abs(half.curvature - exact.curvature) < half.rounding


def test_wrong_arguments_are_errors():
    w = torch.ones(2, requires_grad=True)
    opt = torch.optim.SGD([w], lr=0.1)
    with pytest.raises(TypeError, match="expected Optimizer"):
        Sharpness([w], lambda: w.sum())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every"):
        Sharpness(opt, lambda: w.sum(), every=0)
    with Sharpness(opt, lambda: w, every=1):
        w.sum().backward()
        with pytest.raises(ValueError, match="must return one element"):
            opt.step()
