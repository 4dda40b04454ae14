"""Compiled loops of `unroll`: the values and gradients of eager ones, in float64, in every memory mode."""

import pytest
import torch
from torch.func import grad

import metagrad as mg
from metagrad.autograd.unrolling import compiled
from tests.marks import fast

TRACED = {"backend": "aot_eager"}


def step(state, t, lr, x):
    def loss(w):
        return ((x @ w).tanh() ** 2).sum() + w.square().sum()

    w, count = state
    return (w - lr * grad(loss)(w) / (1 + t), count + 1), loss(w)


def outcome(**options):
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3,), (4, 3)))
    w, lr = w.requires_grad_(), torch.full((options["steps"],), 0.1, dtype=torch.float64, requires_grad=True)
    second = options.pop("second", False)
    (last, count), losses = mg.unroll(step, (w, 0), x, inputs=lr, **options)
    grads = torch.autograd.grad(last.square().sum() + losses.sum(), [w, lr], create_graph=second)
    if second:
        grads = torch.autograd.grad(sum(g.square().sum() for g in grads), [w, lr])
    return last.detach(), count, losses.detach(), *grads


@pytest.mark.parametrize("memory", fast(["full", "step", "2KiB"], ["full", "step", "sqrt", "2KiB"]))
def test_a_compiled_loop_is_an_eager_one(memory):
    found = outcome(steps=4, memory=memory, compile=TRACED)
    torch.testing.assert_close(found, outcome(steps=4), rtol=1e-10, atol=1e-12)


def test_large_steps_keep_the_graphs_of_compiled_code(monkeypatch):
    expected = outcome(steps=3)
    monkeypatch.setattr(compiled, "SMALL", 0)
    torch.testing.assert_close(outcome(steps=3, compile=TRACED), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", fast(["full"], ["full", "step"]))
def test_its_gradient_is_differentiated_again(memory):
    found = outcome(steps=3, memory=memory, compile=TRACED, second=True)
    torch.testing.assert_close(found, outcome(steps=3, second=True), rtol=1e-10, atol=1e-12)


def test_free_tensors_have_their_gradients():
    free = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def scaled(w, t):
        return w - 0.1 * free * w**2, None

    def gradients(**options):
        return torch.autograd.grad(mg.unroll(scaled, w, steps=2, **options)[0].sum(), [w, free])

    for memory in ("full", "step"):
        torch.testing.assert_close(gradients(memory=memory, compile=TRACED), gradients())


def test_what_cannot_be_compiled_runs_eagerly_with_a_warning():
    def branching(w, t):
        return (w * 2 if float(w.detach().sum()) > 0 else w), None

    w = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match=r"unroll\(step, ..., compile\): runs without being compiled"):
        last, _ = mg.unroll(branching, w, steps=2, compile=TRACED)
    assert torch.equal(last, 4 * w)


def test_a_backward_pass_that_cannot_be_compiled_runs_eagerly_with_a_warning():
    w, free, branches = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), []

    def scaled(w, t):
        return (w * free.exp() if not branches or float(w.detach().sum()) > 0 else w), None

    found, _ = mg.unroll(scaled, w, steps=2, compile=TRACED)
    branches.append(True)
    with pytest.warns(UserWarning, match=r"unroll\(step, ..., compile\): runs without being compiled"):
        gradient = torch.autograd.grad(found.sum(), free)[0]
    torch.testing.assert_close(gradient, 2 * found.detach())
