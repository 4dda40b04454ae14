import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import metagrad as mg
from metagrad.memory import MemoryTracker
from metagrad.memory.tracker import hooks_aside
from tests.functions import custom_function

N = 100
BYTES = 8 * N


def leaf(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(N, dtype=torch.float64, generator=generator).requires_grad_()


Cube = custom_function(lambda x: x**3, lambda x: 3 * x**2)


def bilinear(w):
    return ((w.view(10, 10) @ w.view(10, 10).tanh()).sigmoid() * w.view(10, 10)).sum()


FUNCTIONS = {
    "power": lambda w: (w**3).sum() / 3,
    "saved output": lambda w: w.exp().mul(w.sigmoid()).sum(),
    "matmul": bilinear,
    "in-place on an intermediate": lambda w: (w * 2).exp_().sum().sin_(),
    "view": lambda w: (w.view(10, 10)[3:].t() ** 2 * w[:70].view(10, 7)).sum(),
    "custom function": lambda w: Cube.apply(w * w).sum(),
    "vmap": lambda w: torch.vmap(lambda x: (x.sin() * x).sum())(w.view(10, 10)).pow(2).sum(),
    "checkpoint": lambda w: checkpoint(lambda x: (x.sin() * x.exp()).sum(), w, use_reentrant=False),
    "func.jvp": lambda w: torch.func.jvp(lambda x: (x**3).sum(), (w,), (w,))[1],
}


def derivatives(function, order=3):
    """Return the gradients of orders 1 to `order`, each of a non-linear contraction of the previous gradient."""
    w = leaf()
    value, gradients = function(w), []
    for k in range(1, order + 1):
        (gradient,) = torch.autograd.grad(value, w, create_graph=k < order)
        gradients.append(gradient.detach())
        value = (gradient**2).sum()
    return gradients


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_with_the_tracker_open_are_identical(name):
    expected = derivatives(FUNCTIONS[name])
    with MemoryTracker(device="cpu") as mem, mem.phase("work"):
        came = derivatives(FUNCTIONS[name])
    for order, (a, b) in enumerate(zip(came, expected, strict=True), start=1):
        assert torch.equal(a, b), f"order {order}"


def graph_of(function):
    """Return the bytes of the graph at the end of a phase that stores the result of `function`."""
    with MemoryTracker(device="cpu") as mem, mem.phase("work"):
        kept = function()
    assert kept is not None
    return mem.records()[0].graph


W, X = leaf(), leaf(1).detach()

# Each case is a computation, and the bytes that the graph of its result holds.
GRAPHS = {
    "leaf parameters are not counted": (lambda: W * W, 0),
    "nor are views of them": (lambda: W.view(10, 10).t() @ W.view(10, 10), 0),
    "data": (lambda: W * X, BYTES),
    "a saved output": (lambda: W.exp(), BYTES),
    "one storage saved twice": (lambda: W * X + W * X.view(10, 10).view(-1), BYTES),
    "an intermediate": (lambda: (W * 2).sin(), BYTES),
    "nothing is saved": (lambda: W + X, 0),
    "no grad": (lambda: X * X, 0),
    "dropped": (lambda: (W.exp(), None)[1] or X, 0),
    "a view holds its whole storage": (lambda: W[0] * X[0], BYTES),
    "vmap": (lambda: torch.vmap(torch.exp)(W.view(10, 10)), BYTES),
    "checkpoint saves nothing": (lambda: checkpoint(lambda x: x.exp().sin(), W, use_reentrant=False), 0),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_bytes(name):
    function, expected = GRAPHS[name]
    assert graph_of(function) == expected


def test_graph_bytes_of_a_phase_include_nested_ones_and_count_storages_once():
    with MemoryTracker(device="cpu") as mem, mem.outer(0):
        with mem.inner(0):
            first = W * X
        with mem.inner(1):
            second = W * X
        third = W.exp()
    assert [record.graph for record in mem.records()] == [2 * BYTES, BYTES, BYTES]
    assert first is not second is not third


def test_backward_frees_the_graph():
    with MemoryTracker(device="cpu") as mem:
        with mem.phase("forward"):
            value = W.exp().sin().sum()
        with mem.phase("backward"):
            torch.autograd.grad(value, W)
        with mem.phase("next"):
            pass
    assert [record.graph for record in mem.records()] == [BYTES, 0, 0]
    assert [p.held_after for p in mem._run.closed_phases()] == [BYTES, 0, 0]


def test_the_hooks_make_no_reference_cycle():
    gc.collect()
    gc.disable()
    try:
        with MemoryTracker(device="cpu") as mem, mem.phase("work"):
            hidden = W * 2
            value = hidden.exp().sin().sum()
            alive = weakref.ref(hidden)
            del hidden, value
            assert alive() is None
        assert mem.records()[0].after == 0
    finally:
        gc.enable()


def modified_input():
    x = W * 2
    y = x.sin()
    x.mul_(3)
    return y


def modified_leaf():
    w = leaf()
    y = w * w
    with torch.no_grad():
        w.add_(1)
    return y


def modified_view():
    x = W * 2
    y = x.sin()
    x[3:5].zero_()
    return y


MODIFIED = [modified_input, modified_leaf, modified_view]


@pytest.mark.parametrize("make", MODIFIED)
def test_in_place_modification_of_a_saved_tensor_still_raises(make):
    message = "one of the variables needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        make().sum().backward()
    with MemoryTracker(device="cpu"):
        value = make().sum()
        with pytest.raises(RuntimeError, match=message + r".*is at version \d; expected version \d instead"):
            value.backward()


def test_func_grad_is_refused_by_torch_and_runs_with_the_hooks_aside():
    with MemoryTracker(device="cpu") as mem, mem.phase("work"):
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            torch.func.grad(lambda x: (x**2).sum())(X)
        with hooks_aside():
            torch.func.grad(lambda x: (x**2).sum())(X)
        mg.hvp(lambda w: (w**3).sum(), W, X, mode="forward")
        kept = W.exp()
    assert mem.records()[0].graph == BYTES == 8 * kept.numel()
    with hooks_aside():
        torch.func.grad(lambda x: (x**2).sum())(X)


def test_opening_under_the_hooks_of_others_is_refused():
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(RuntimeError, match="expected no saved-tensor hooks to be on, but found some"),
    ):
        MemoryTracker(device="cpu").__enter__()
