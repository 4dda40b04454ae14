"""Formulas that torch has no optimizer for, and row-sparse gradients."""

import pytest
import torch

from metagrad.optim import Lion
from metagrad.optim.arithmetic import root
from metagrad.optim.rules import adam, adamw, lion, rmsprop


def test_lion_is_the_algorithm_of_the_paper():
    """Algorithm 2 on three elements, number by number."""
    lr, beta1, beta2, decay = 0.1, 0.9, 0.99, 0.5
    w, m = [1.0, -2.0, 3.0], [0.0, 0.0, 0.0]
    rule = lion(lr, betas=(beta1, beta2), weight_decay=decay)
    params = {"w": torch.tensor(w, dtype=torch.float64)}
    state = rule.init(params)
    for g in ([1.0, -1.0, 0.0], [-20.0, 0.5, 2.0], [0.1, 0.1, -0.1]):
        for i in range(3):
            c = beta1 * m[i] + (1 - beta1) * g[i]
            w[i] -= lr * ((c > 0) - (c < 0) + decay * w[i])
            m[i] = beta2 * m[i] + (1 - beta2) * g[i]
        params, state = rule.update({"w": torch.tensor(g, dtype=torch.float64)}, state, params)
        torch.testing.assert_close(params["w"], torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=0)
        torch.testing.assert_close(state.mean["w"], torch.tensor(m, dtype=torch.float64), rtol=1e-12, atol=0)


def moved(make, eps_root):
    """Return a parameter after three steps of a rule, whose last element has no gradient."""
    rule = make(lr=0.1, eps_root=eps_root)
    params = {"w": torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)}
    state = rule.init(params)
    for g in GRADIENTS:
        params, state = rule.update({"w": g}, state, params)
    return params["w"]


GRADIENTS = torch.tensor([[0.3, -0.2, 0.0], [0.1, 0.4, 0.0], [-0.1, 0.2, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(("make", "decay"), [(adam, 0.0), (adamw, 0.01), (rmsprop, 0.0)])
def test_eps_root_is_inside_the_root(make, decay):
    """The formula of optax, and its derivative by central differences."""
    eps_root = torch.tensor(1e-3, dtype=torch.float64, requires_grad=True)
    w, m, v = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), 0.0, 0.0
    for t, g in enumerate(GRADIENTS, 1):
        if make is rmsprop:
            v = 0.99 * v + 0.01 * g**2
            w = w - 0.1 * g / ((v + 1e-3).sqrt() + 1e-8)
            continue
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        w = w * (1 - 0.1 * decay) - 0.1 * m / (1 - 0.9**t) / ((v / (1 - 0.999**t) + 1e-3).sqrt() + 1e-8)
    found = moved(make, eps_root)
    torch.testing.assert_close(found, w, rtol=1e-13, atol=0)
    torch.testing.assert_close(moved(make, 1e-3), w, rtol=1e-13, atol=0)
    for i, value in enumerate(found[:2]):
        slope = torch.autograd.grad(value, eps_root, retain_graph=True)[0]
        difference = (moved(make, 1e-3 + 1e-7) - moved(make, 1e-3 - 1e-7))[i] / 2e-7
        assert float(slope) == pytest.approx(float(difference), rel=1e-6)
    assert float(torch.autograd.grad(found[2], eps_root)[0]) == 0


def test_root_has_zero_derivatives_at_zero_and_the_roots_elsewhere():
    x = torch.tensor([0.0, 4.0, 9.0], dtype=torch.float64, requires_grad=True)
    y = root(x)
    assert y.tolist() == [0, 2, 3]
    first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    assert first.tolist() == [0, 1 / 4, 1 / 6]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(second, torch.tensor([0, -1 / 32, -1 / 108], dtype=torch.float64))
    assert torch.autograd.grad(second.sum(), x)[0][0] == 0
    assert root(torch.tensor([float("nan"), -1.0])).isnan().all()


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "maximize": True, "betas": (0.5, 0.6)}], ids=str
)
def test_the_optimizer_takes_the_steps_of_the_rule_bit_for_bit(options):
    p = torch.linspace(-1, 1, 7).requires_grad_()
    params, rule, opt = {"w": p.detach().clone()}, lion(0.1, **options), Lion([p], lr=0.1, **options)
    state = rule.init(params)
    for seed in range(4):
        p.grad = torch.randn(7, generator=torch.Generator().manual_seed(seed))
        params, state = rule.update({"w": p.grad}, state, params)
        opt.step()
        assert torch.equal(p, params["w"])
        assert torch.equal(opt.state[p]["mean"], state.mean["w"])
