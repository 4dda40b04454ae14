import contextlib
import functools
import gc
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import metagrad as mg
from metagrad.autograd.recompute.replay import record
from metagrad.memory.storages import StorageCounter, StorageMode
from metagrad.sparse import Pattern, SparseTensor
from tests.draws import leaf


def derivatives(fn, inputs, orders=3) -> list[Tensor]:
    """Return the gradients of non-linear contractions of all lower derivatives, order by order."""
    loss, collected = fn(*inputs).pow(2).sum(), []
    for _ in range(orders):
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        assert all(g.requires_grad for g in grads)
        collected += grads
        loss = loss + sum((g**2 + g).sum() for g in grads)
    return collected


def assert_same_derivatives(recomputed, plain, inputs, orders=3):
    torch.manual_seed(7)
    expected = derivatives(plain, inputs, orders)
    torch.manual_seed(7)
    got = derivatives(recomputed, inputs, orders)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(b.detach().abs().max() + 1))


def layer(x, w):
    return torch.tanh(x @ w).sin()


FORMS = {
    "arguments": lambda x, w: mg.checkpoint(layer, x, w),
    "keyword": lambda x, w: mg.checkpoint(lambda x, *, w: layer(x, w), x, w=w),
    "closure": lambda x, w: mg.checkpoint(lambda x: layer(x, w), x),
    "only a closure": lambda x, w: mg.checkpoint(lambda: layer(x, w)),
    "tree": lambda x, w: mg.checkpoint(lambda t: {"y": layer(t["x"], t["w"][0])}, {"x": x, "w": [w]})["y"],
    "nested": lambda x, w: mg.checkpoint(lambda x, w: mg.checkpoint(layer, x, w), x, w),
    "nested closures": lambda x, w: mg.checkpoint(lambda x: mg.checkpoint(lambda z: layer(z, w), x), x),
    "a closure that is returned as it is": lambda x, w: mg.checkpoint(lambda x: w, x).sum() * layer(x, w),
    "twice the same tensor": lambda x, w: mg.checkpoint(layer, mg.checkpoint(layer, x, w), w),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_derivatives_equal_those_of_the_plain_call(form):
    plain = {
        "twice the same tensor": lambda x, w: layer(layer(x, w), w),
        "a closure that is returned as it is": lambda x, w: w.sum() * layer(x, w),
    }.get(form, layer)
    assert_same_derivatives(FORMS[form], plain, (leaf(3, 4), leaf(4, 4, seed=1)))


def test_one_tensor_in_two_places_has_the_sum_of_both_derivatives():
    assert_same_derivatives(lambda x: mg.checkpoint(torch.mul, x, x.sin()), lambda x: x * x.sin(), (leaf(4),))
    assert_same_derivatives(lambda x: mg.checkpoint(torch.mul, x, x), lambda x: x * x, (leaf(4),))


class Block(nn.Module):
    """A layer with a buffer, dropout and substituted weights."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)
        self.recompute = recompute

    def forward(self, x):
        return mg.checkpoint(self.inner, x) if self.recompute else self.inner(x)

    def inner(self, x):
        return F.dropout(torch.tanh(self.norm(self.linear(x))), 0.3)


def meta_gradient(recompute: bool) -> list[Tensor]:
    """Differentiate three inner steps of a module whose weights functional_call substitutes."""
    torch.manual_seed(0)
    model = Block(recompute)
    params = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    x = leaf(5, 4).detach()
    fast = params
    for _ in range(3):
        loss = functional_call(model, fast, (x,)).pow(2).sum()
        grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {k: p - 0.1 * g for (k, p), g in zip(fast.items(), grads, strict=True)}
    loss = functional_call(model, fast, (x,)).pow(2).sum()
    grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), list(params.values()))
    buffers = [model.norm.running_mean, model.norm.running_var, model.norm.num_batches_tracked]
    return [*grads, *second, *buffers, torch.rand(1)]


def test_right_under_functional_call_with_dropout_and_running_statistics():
    """torch.utils.checkpoint recomputes with the module's own weights here: 44 % error."""
    with mg.models.composite_norms():  # torch's own has no third derivative
        recomputed, kept = meta_gradient(True), meta_gradient(False)
    for got, expected in zip(recomputed, kept, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("within", [True, False])
def test_function_modes_of_the_call_are_those_of_its_recomputation(within):
    """Torch disables a mode while it runs autograd.grad, and after the block of the mode. Order 3 shows it."""
    x, norm = leaf(2, 3), torch.nn.LayerNorm(3, dtype=torch.float64)

    def third_derivative(fn):
        block = mg.models.composite_norms()
        with block:
            total = fn(x).sin().sum()
        for _ in range(3):
            with block if within else contextlib.nullcontext():
                (g,) = torch.autograd.grad(total, x, create_graph=True)
            total = g.pow(2).sum()
        return g

    got = third_derivative(lambda x: mg.checkpoint(norm, x))
    torch.testing.assert_close(got, third_derivative(norm), rtol=1e-10, atol=1e-10)


def test_a_generator_of_ones_own_is_set_back_for_the_recomputation():
    x, generator = leaf(5), torch.Generator()

    def noisy(x):
        return (x * torch.rand(5, generator=generator, dtype=torch.float64)).sin()

    generator.manual_seed(1)
    expected = derivatives(noisy, (x,))
    generator.manual_seed(1)
    got = derivatives(lambda x: mg.checkpoint(noisy, x), (x,))
    after = torch.rand(1, generator=generator)
    generator.manual_seed(1)
    noisy(x)
    assert torch.equal(after, torch.rand(1, generator=generator))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("is_outside", [True, False])
def test_under_autocast_a_weight_may_be_used_twice(is_leaf, is_outside):
    """The cache of autocast would cast a leaf once, and another tensor twice."""
    x, weight = leaf(3, 4).float(), leaf(4, 4, dtype=torch.float32)

    def product(w):
        with contextlib.nullcontext() if is_outside else torch.autocast("cpu", dtype=torch.bfloat16):
            return ((x @ w).tanh() @ w).float()

    def derivatives(call):
        w = weight if is_leaf else weight * 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_outside):
            y = call(w)
        first = mg.grad(y.square().sum(), weight, create_graph=True)
        return first, mg.grad(first.square().sum(), weight)

    of_checkpoint, plain = derivatives(lambda w: mg.checkpoint(product, w)), derivatives(product)
    for found, expected in zip(of_checkpoint, plain, strict=True):
        error = 8 * torch.finfo(torch.bfloat16).eps * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=error)


def test_nothing_is_recorded_without_grad_mode():
    calls = []
    with torch.no_grad():
        y = mg.checkpoint(lambda x: calls.append(1) or x * 2, leaf(3))
    assert not y.requires_grad
    assert calls == [1]


def test_outputs_that_do_not_depend_on_anything_do_not_require_grad():
    y, n, k = mg.checkpoint(lambda x: (x * 2, torch.arange(3), "text"), leaf(3))
    assert y.requires_grad
    assert not n.requires_grad
    assert k == "text"


def test_the_graph_of_the_gradient_is_not_stored_either():
    w = leaf(64, 64)
    x = leaf(64, 64)

    def deep(x):
        for _ in range(20):
            x = torch.tanh(x @ w)
        return x

    def kept(fn):
        with mg.MemoryTracker(device="cpu") as mem, mem.phase("gradient"):
            grads = torch.autograd.grad(fn(x).pow(2).sum(), [x, w], create_graph=True)
        (record,) = mem.records()
        del grads
        return record.after - record.before

    square = 64 * 64 * 8
    assert kept(deep) > 60 * square
    assert kept(lambda x: mg.checkpoint(deep, x)) < 8 * square


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


def test_custom_functions_inside():
    x, w = leaf(4), leaf(4, seed=1)
    plain = lambda x, w: Product.apply(x, w).tanh()  # noqa: E731
    assert_same_derivatives(lambda x, w: mg.checkpoint(plain, x, w), plain, (x, w))
    apart = lambda x, w: Product.apply(w, w).tanh() * x  # noqa: E731
    assert_same_derivatives(lambda x, w: mg.checkpoint(lambda x: apart(x, w), x), apart, (x, w))


class Hidden:
    """Holds a tensor in a slot, which is not searched."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


def test_a_leaf_that_cannot_be_found():
    x, w = leaf(3, 4), leaf(4, 4, seed=1)
    hidden = Hidden(w)
    assert_same_derivatives(lambda x, w: mg.checkpoint(lambda x: layer(x, hidden.tensor), x), layer, (x, w))
    both = lambda x, w: layer(x, w) * w.sum()  # noqa: E731
    assert_same_derivatives(
        lambda x, w: mg.checkpoint(lambda x, w: both(x, hidden.tensor) * w.sum() / w.sum(), x, w),
        both,
        (x, w),
    )


@pytest.mark.parametrize(
    "form", ["a tuple", "a partial", "a default", "an attribute", "a list in a dict", "a global"]
)
def test_tensors_with_a_graph_are_found_wherever_a_function_keeps_them(form):
    x, w = leaf(3, 4), leaf(4, 4, seed=1)

    def recomputed(x, w):
        v = w.sin()
        pair, held, nested = (1, v), SimpleNamespace(v=v), {"a": [v]}
        globals()["_held"] = v
        functions = {
            "a tuple": lambda x: layer(x, pair[1]),
            "a partial": functools.partial(lambda w, x: layer(x, w), v),
            "a default": lambda x, v=v: layer(x, v),
            "an attribute": lambda x: layer(x, held.v),
            "a list in a dict": lambda x: layer(x, nested["a"][0]),
            "a global": lambda x: layer(x, _held),  # type: ignore[name-defined]  # noqa: F821
        }
        y = mg.checkpoint(functions[form], x)
        # The recomputation must not read the new values.
        pair, held.v, nested["a"][0] = (1, v.detach()), v.detach(), v.detach()
        globals()["_held"] = None
        return y

    assert_same_derivatives(recomputed, lambda x, w: layer(x, w.sin()), (x, w))


def test_a_hook_of_a_parameter_runs_once():
    x, w = leaf(3, 4), leaf(4, 4, seed=1)
    w.register_hook(lambda g: 2 * g)
    expected = torch.autograd.grad(layer(x, w).sum(), w)[0]
    for fn in (lambda: mg.checkpoint(layer, x, w), lambda: mg.checkpoint(lambda x: layer(x, w), x)):
        torch.testing.assert_close(torch.autograd.grad(fn().sum(), w)[0], expected)


def test_a_leaf_that_the_function_makes_is_not_kept():
    x = leaf(3, 4)

    def first_order(x):
        w = x.detach().sin().requires_grad_()
        return x - 0.1 * mg.grad(w.pow(3).sum(), w)

    assert_same_derivatives(
        lambda x: mg.checkpoint(first_order, x).sin(), lambda x: first_order(x).sin(), (x,)
    )
    assert len(record(first_order, (x,), {}, name="call").tensors) == 1


def test_what_is_written_into_after_it_was_read_is_replayed_from_its_old_value():
    table, x = torch.ones(3), torch.ones(3, requires_grad=True)

    def fn(x):
        y = x + table
        table.add_(1)
        return y.square()

    (g,) = torch.autograd.grad(mg.checkpoint(fn, x).sum(), x)
    assert torch.equal(g, torch.full((3,), 4.0))
    assert torch.equal(table, torch.full((3,), 2.0))


@pytest.mark.parametrize("size", [3, 2**15])
def test_a_constant_that_changed_before_the_recomputation(size):
    """The result is zero, so that only the derivative shows the change."""
    table, x = torch.ones(size), torch.zeros(size, requires_grad=True)
    y = mg.checkpoint(lambda x: x * table, x)
    table.mul_(2)
    if size == 3:
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0] * 3
        assert table.tolist() == [2.0] * 3
    else:
        with pytest.raises(RuntimeError, match=r"shape \(32768,\).*modified in place"):
            y.sum().backward()


def test_a_large_constant_that_is_written_into_is_refused():
    table = torch.ones(2**15)
    with pytest.raises(ValueError, match=r"shape \(32768,\) that it did not make and writes into it in"):
        mg.checkpoint(lambda x: table.add_(x), torch.ones(1))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_what_is_dropped_is_free_before_garbage_is_collected(order):
    """A circle of references that holds a tensor would keep it until the collector runs."""
    pattern = Pattern(torch.arange(4), torch.arange(4), (4, 4))
    x, w, values = leaf(4, 3), leaf(3, 3, seed=1), leaf(4, seed=2)

    def compute():
        loss = mg.checkpoint(lambda x: SparseTensor(pattern, values) @ layer(x, w), x).square().sum()
        for k in range(order):
            loss = torch.autograd.grad(loss, w, create_graph=k < order - 1)[0].square().sum()

    compute()  # the pattern caches its pointers
    gc.collect()
    gc.disable()
    try:
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            compute()
        assert counter.total == 0
    finally:
        gc.enable()
