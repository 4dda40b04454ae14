"""A call that does what an earlier one did is not run again: its derivative is that one's, on other tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from metagrad.autograd.recompute import program
from metagrad.autograd.recompute.program import forget_programs


@pytest.fixture(autouse=True)
def _no_programs():
    forget_programs()


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


class Scaled(torch.autograd.Function):
    """An identity that scales gradients."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


def step(w: Tensor, t: int, x: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
    loss = (x @ w).tanh().square().mean()
    return w - lr * mg.grad(loss, w, create_graph=True), loss


def derivatives(memory: str, order: int) -> list[Tensor]:
    w, lr, x = randn(5, 2), torch.tensor(0.3, dtype=torch.float64, requires_grad=True), randn(7, 5, seed=1)
    last, losses = mg.unroll(step, w, x, lr, steps=4, memory=memory)
    result, inputs = last.pow(2).sum() + losses.sum(), [w, lr, x]
    found: list[Tensor] = []
    for left in reversed(range(order)):
        found = list(torch.autograd.grad(result, inputs, create_graph=left > 0))
        result = torch.stack([g.pow(3).sum() for g in found]).sum()
    return found


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("memory", ["step", "sqrt", "6KiB"])
def test_derivatives_equal_those_of_a_plain_loop_at_every_order(memory, order):
    expected = derivatives("full", order)
    for _ in range(3):
        for got, wanted in zip(derivatives(memory, order), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_a_known_derivative_does_not_run_the_function_again():
    runs = []

    def counted(w, t, *args):
        runs.append(t)
        return step(w, t, *args)

    def times_run() -> int:
        runs.clear()
        w, lr = randn(5, 2), torch.tensor(0.3, dtype=torch.float64)
        last, _ = mg.unroll(counted, w, randn(7, 5, seed=1).detach(), lr, steps=4, memory="step")
        last.pow(2).sum().backward()
        return len(runs)

    # The first step, before which there was none, and the last, of which the operations are noted.
    assert times_run() == 4 + 2
    assert times_run() == 4


def alike():
    """Functions that differ in one thing each."""
    a, b = randn(4, seed=2), randn(4, seed=3)
    mask = torch.tensor([True, False, True, False])

    def flags(enabled):
        def f(x):
            with torch.set_grad_enabled(enabled):
                y = x.sin()
            return x * y

        return f

    return {
        "a rate": [lambda x: x.sin() * 2, lambda x: x.sin() * 3],
        "types of numbers": [lambda x: (x * 0 + 1).pow(2) * x, lambda x: (x * False + 1).pow(2) * x],
        "signs of zeros": [
            lambda x: x * torch.full((4,), 0.0).copysign(torch.tensor(0.0)).add(1),
            lambda x: x / torch.tensor(-0.0).copysign(torch.tensor(-0.0)).sub(1),
        ],
        "which tensor": [
            lambda x: [y := x.sin(), z := x.cos(), y * y * z][2],
            lambda x: [y := x.sin(), z := x.cos(), y * z * z][2],
        ],
        "which result": [lambda x: (x.sin(), x.cos()), lambda x: (x.sin(), x.cos())[::-1]],
        "which free tensor": [lambda x: x * a.sin(), lambda x: x * b.sin()],
        "grad mode": [flags(True), flags(False)],
        "a detached tensor": [lambda x: x * x.detach(), lambda x: x.detach() * x],
        "an argument or another": [lambda x: x * 1 * x, lambda x: x * (x * 1)],
        "shapes": [lambda x: x.repeat(2).sin().sum(), lambda x: x.repeat(3).sin().sum()],
        "strides": [lambda x: x.view(2, 2).sin().view(4), lambda x: x.view(2, 2).t().sin().flatten()],
        "literals": [lambda x: x * torch.tensor([1.0, 2, 3, 4]), lambda x: x * torch.tensor([1.0, 2, 3, 5])],
        "written literals": [lambda x: x * torch.tensor(1.0).add_(x.detach().sum()), lambda x: x * 2],
        "masks": [lambda x: x[mask].sin().sum(), lambda x: x[~mask].sin().sum()],
        "masks of values": [lambda x: x[x > 0].sin(), lambda x: x[x < 0].sin()],
        "numbers read": [lambda x: x * x[0].item(), lambda x: x * x[1].item()],
        "in place": [lambda x: (x * 1).mul_(x).sin_(), lambda x: (x * 2).mul_(x).sin_()],
        "a mean": [lambda x: F.softplus(x * 2).mean(), lambda x: F.softplus(x * 2).sum()],
    }


@pytest.mark.parametrize("case", alike())
def test_functions_that_look_alike_have_derivatives_of_their_own(case):
    functions = alike()[case]
    for seed in range(4):
        for function in functions:
            x = randn(4, seed=seed)

            def total(value) -> Tensor:
                parts = value if isinstance(value, tuple) else (value,)
                return torch.stack([(i + 1) * part.pow(2).sum() for i, part in enumerate(parts)]).sum()

            (got,) = torch.autograd.grad(total(mg.checkpoint(function, x)), x)
            (expected,) = torch.autograd.grad(total(function(x)), x)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def hidden():
    """Functions whose derivative depends on a number that no torch function is handed."""

    def hook(x, n):
        y = x * 1
        y.register_hook(lambda g: g * n)
        return y

    def node_hook(x, n):
        y = x * 1
        y.grad_fn.register_hook(lambda ins, outs: tuple(g if g is None else g * n for g in ins))
        return y

    def data(x, n):
        y = x * 1
        y.data = y.data * n
        return y * y

    def by_numpy(x, n):
        scale = torch.ones(4, dtype=torch.float64)
        scale.numpy()[:] = n
        return x * scale

    return {
        "a hook": hook,
        "a hook of a node": node_hook,
        "a custom function": lambda x, n: Scaled.apply(x, n) * 1,
        "data": data,
        "NumPy": by_numpy,
        "random numbers": lambda x, n: x * torch.rand(4, dtype=torch.float64) * n,
    }


@pytest.mark.parametrize("case", hidden())
def test_what_no_torch_function_is_handed_is_run_again(case):
    function = hidden()[case]
    for n in (2.0, 3.0, 4.0, 5.0):
        x = randn(4)
        torch.manual_seed(int(n))
        (expected,) = torch.autograd.grad(function(x, n).sum(), x)
        torch.manual_seed(int(n))
        (got,) = torch.autograd.grad(mg.checkpoint(function, x, n).sum(), x)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_one_tensor_in_two_arguments_and_two_tensors_there():
    def product(x, y):
        return x.sin() * y.cos()

    x, y = randn(3), randn(3, seed=1)
    for first, second in [(x, x), (x, x), (x, y), (y, x), (y, y)]:
        got = torch.autograd.grad(mg.checkpoint(product, first, second).sum(), (x, y), allow_unused=True)
        expected = torch.autograd.grad(product(first, second).sum(), (x, y), allow_unused=True)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_only_some_of_the_derivatives_and_of_the_results():
    def two(x, y):
        return x.sin() * y, (x * y).cos()

    x, y = randn(3), randn(3, seed=1)
    for _ in range(3):
        for of in (0, 1):
            for by in (x, y):
                (got,) = torch.autograd.grad(mg.checkpoint(two, x, y)[of].sum(), by)
                (expected,) = torch.autograd.grad(two(x, y)[of].sum(), by)
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_an_operand_that_was_written_into_unseen_is_an_error():
    array = np.ones(4)
    shared = torch.from_numpy(array)
    for _ in range(3):
        x = randn(4)
        y = mg.checkpoint(lambda x: (x * shared).sum(), x)
        torch.autograd.grad(y, x, retain_graph=True)
    array[:] = 2
    with pytest.raises(RuntimeError, match=r"did not repeat.*shape \(\) has other values"):
        torch.autograd.grad(y, x)


def test_an_operand_that_the_derivative_alone_depends_on_is_compared():
    array = np.ones(4)
    shared = torch.from_numpy(array)

    for _ in range(3):
        x = randn(4)
        first, second = mg.checkpoint(lambda x: (x.sum(), x * shared), x)  # the first is compared
        y = first + second.sum()
        torch.autograd.grad(y, x, retain_graph=True)
    array[:] = 2
    with pytest.raises(RuntimeError, match=r"did not repeat.*shape \(4,\) has other values"):
        torch.autograd.grad(y, x)


def test_another_tensor_in_the_same_place_is_an_error():
    runs = []

    def function(x):
        runs.append(x)
        y, z = x.sin(), x.cos()
        return (y if len(runs) == 1 else z) * 1 + (y.detach() * 0)

    x = torch.zeros(3, requires_grad=True)
    y = mg.checkpoint(function, x)
    with pytest.raises(RuntimeError, match=r"torch function 2, mul\(..., 1\), had another tensor in place 0"):
        y.sum().backward()


def test_settings_that_change_before_the_backward_pass_change_nothing():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        y = mg.checkpoint(lambda x: x.sin() * torch.ones(3), x)
        with torch.device("meta"), torch.autocast("cpu"):
            (g,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(g, x.detach().cos())


def test_operations_that_take_arguments_from_cpp_alone_are_run_again():
    lstm = torch.nn.LSTM(3, 4).double()  # on a CPU its backward pass hands over a tensor that is undefined
    for seed in range(4):
        x = randn(5, 2, 3, seed=seed)
        (got,) = torch.autograd.grad(mg.checkpoint(lambda x: lstm(x)[0], x).pow(2).sum(), x)
        (expected,) = torch.autograd.grad(lstm(x)[0].pow(2).sum(), x)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_autocast_inside_is_seen_by_the_dtypes_it_makes():
    def function(x, enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return (x @ x).float()

    for enabled in (False, False, True, False, True, True):
        x = randn(3, 3).float().detach().requires_grad_()
        (got,) = torch.autograd.grad(mg.checkpoint(function, x, enabled).pow(2).sum(), x)
        (expected,) = torch.autograd.grad(function(x, enabled).pow(2).sum(), x)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def layers(w, v, b, x):
    return (torch.baddbmm(b.unsqueeze(1), torch.bmm(x, w.transpose(1, 2)).relu(), v.mT) - x).square()


def test_a_program_transposes_fills_and_adds_no_more_than_it_must(monkeypatch):
    graphs, compiled = [], program._compiled
    monkeypatch.setattr(
        program, "_compiled", lambda graph, held: graphs.append(graph) or compiled(graph, held)
    )

    def function(w, v, b, x):
        return mg.grad(layers(w, v, b, x).mean(), w, create_graph=True)

    for seed in range(4):
        given = [randn(*shape, seed=seed) for shape in ((2, 20, 16), (2, 16, 20), (2, 16), (2, 17, 16))]
        got = torch.autograd.grad(mg.checkpoint(function, *given).pow(3).sum(), given)
        for one, other in zip(got, torch.autograd.grad(function(*given).pow(3).sum(), given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    (graph,) = graphs
    names = [node.target.overloadpacket.__name__ for node in graph.nodes if node.op == "call_function"]
    assert not {"ones_like", "zeros_like", "transpose"} & set(names)
    assert not any(transposes_in_vain(node) for node in graph.nodes)
    assert names.count("baddbmm") >= 4


def transposes_in_vain(node):
    """Say whether a node transposes what was transposed, or a product that nothing else reads."""
    swap = torch.ops.aten.permute.default
    if node.target is not swap:
        return False
    (source, _) = node.args
    return source.target is swap or (source.target is torch.ops.aten.bmm.default and len(source.users) == 1)


def test_a_gradient_that_is_zero_belongs_to_the_caller():
    for _ in range(4):
        x = randn(3)
        (g,) = torch.autograd.grad(mg.checkpoint(torch.round, x).sum(), x)
        assert not g.any()
        g.add_(1)
