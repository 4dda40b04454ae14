"""Many products with a Hessian or a Jacobian from one graph: correct, in chunks that bound the memory, and freed."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.autograd.derivatives.linearize import linearize
from metagrad.autograd.derivatives.recorded import BatchedVjp, Recorded, recorded_gradient
from metagrad.memory.storages import StorageCounter, StorageMode
from metagrad.sparse import Pattern, SparseTensor, embedding
from tests.autograd.hessians import dense_hessian, flat


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x, y = torch.randn(5, 3, dtype=dtype), torch.randn(5, 2, dtype=dtype)
    return model, lambda: (model(x) - y).square().mean()


def stack_like(params, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(k, *p.shape, dtype=p.dtype, generator=generator) for key, p in params.items()}


@pytest.mark.parametrize("chunk", ["64MiB", "1KiB", 1])
def test_stacks_are_products_with_the_dense_hessian_in_chunks_of_any_size(chunk):
    model, _ = mlp()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    params = dict(model.named_parameters())
    expected = dense_hessian(
        lambda p: (torch.func.functional_call(model, p, (x,)) - y).square().mean(), params
    )
    vs = stack_like(params, 23)
    with linearize((model(x) - y).square().mean(), params) as lin:
        found = lin.hvp(vs, chunk=chunk)
        single = lin.hvp({key: v[7] for key, v in vs.items()})
    torch.testing.assert_close(flat(found, 1), flat(vs, 1) @ expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat(single), flat(vs, 1)[7] @ expected, rtol=1e-10, atol=1e-12)


def test_any_tree_serves_for_parameters():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    b = torch.tensor(3.0, requires_grad=True)
    with linearize((w**3).sum() * b, [w, (b,)]) as lin:
        torch.testing.assert_close(lin.gradient[0], torch.tensor([9.0, 36.0]))
        (to_w, (to_b,)) = lin.hvp([torch.tensor([1.0, 0.0]), (torch.tensor(1.0),)])
    torch.testing.assert_close((to_w, to_b), (torch.tensor([21.0, 12.0]), torch.tensor(3.0)))
    with linearize(w.square().sum(), w) as lin:
        assert lin.hvp(torch.eye(2)).tolist() == [[2.0, 0.0], [0.0, 2.0]]


def test_sparse_tensors_are_differentiated_in_their_values():
    pattern = Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
    a = SparseTensor(pattern, torch.tensor([2.0, 3.0])).requires_grad_()
    with linearize((a @ torch.tensor([1.0, 2.0])).pow(3).sum(), {"a": a}) as lin:
        found = lin.hvp({"a": a.with_values(torch.tensor([1.0, 10.0]))})["a"]
        assert lin.gradient["a"].pattern is pattern
    assert found.pattern is pattern
    assert found.values.tolist() == [6 * 4.0 * 4, 6 * 3.0 * 10]  # 6 (a x) x^2


# Third derivatives


@pytest.mark.parametrize("batched", [False, True])
def test_products_can_be_differentiated_again(batched):
    model, _ = mlp()
    x = torch.randn(4, 3, dtype=torch.float64)
    names = [name for name, _ in model.named_parameters()]
    inputs = [p.detach().requires_grad_() for p in model.parameters()]
    vs = [torch.randn(*([6] if batched else []), *p.shape, dtype=torch.float64) for p in inputs]

    def products(params, vs, x):
        params = dict(zip(names, params, strict=True))
        loss = torch.func.functional_call(model, params, (x,)).sin().sum()
        with linearize(loss, params, create_graph=True) as lin:
            return lin.hvp(dict(zip(names, vs, strict=True)))

    inputs = (inputs, [v.requires_grad_() for v in vs], x.requires_grad_())
    assert mg.gradcheck(products, inputs, order=1, directions=1)
    assert mg.gradcheck(lambda p: products(p, vs, x), (inputs[0],), order=2, directions=1)


# Life


def graph_loss(params):
    x = torch.linspace(0, 1, 300).view(100, 3)
    return (torch.tanh(x @ params["w"]) @ params["u"]).square().sum()


def test_the_graph_is_freed_to_the_byte():
    params = {"w": torch.randn(3, 50, requires_grad=True), "u": torch.randn(50, requires_grad=True)}
    vs = stack_like(params, 6)
    gc.disable()
    try:
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            with linearize(graph_loss(params), params) as lin:
                lin.hvp(vs)
                assert counter.total > 40_000
            held = sum(g.nbytes for g in lin.gradient.values()) + lin.loss.nbytes
            assert counter.total == held
            del lin
            assert counter.total == 0
    finally:
        gc.enable()


def test_only_what_linearize_made_is_freed():
    w = torch.randn(4, requires_grad=True)
    loss = w.sin().sum()
    with linearize(loss, w):
        pass
    torch.testing.assert_close(torch.autograd.grad(loss, w)[0], w.detach().cos())


# Errors


def test_closed_is_closed():
    w = torch.ones(2, requires_grad=True)
    lin = linearize((w**2).sum(), {"w": w})
    assert repr(lin) == "Linearization(loss=2, 1 tensors, open)"
    lin.close()
    lin.close()
    assert "closed" in repr(lin)
    assert lin.gradient["w"].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="closed, and the graph is freed"):
        lin.hvp({"w": torch.ones(2)})


def test_products_that_are_not_finite_name_their_parameter():
    a, b = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    with linearize((a**2).sum() + b.norm(), {"a": a, "b": b}) as lin:
        with pytest.raises(ValueError, match=r"the product has nan or inf in the entry of params\['b'\]"):
            lin.hvp({"a": torch.ones(2), "b": torch.ones(2)})
        with pytest.raises(ValueError, match=r"v has nan or inf in the entry of params\['a'\]"):
            lin.hvp({"a": torch.tensor([1.0, torch.nan]), "b": torch.zeros(2)})


def test_a_freed_graph_is_named():
    w = torch.ones(2, requires_grad=True)
    loss = (w**2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"linearize\(loss, params\): (?s:.*) freed the graph"):
        linearize(loss, w)


@pytest.mark.filterwarnings("ignore:.*custom autograd.Function")
def test_missing_derivatives_are_named():
    x = torch.rand(3, 2, requires_grad=True)
    with pytest.raises(MissingDerivative, match=r"HardsigmoidBackward0, from F\.hardsigmoid, raises an"):
        linearize(F.hardsigmoid(x).sum(), x)

    class Once(torch.autograd.Function):
        """A function whose backward calls an operation without a derivative."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return cotangent * F.hardsigmoid(x).detach() + torch.ops.aten.hardsigmoid_backward(cotangent, x)

    with (
        linearize(Once.apply(x).sum(), x) as lin,
        pytest.raises(RuntimeError, match="derivative for"),
    ):
        lin.hvp(torch.ones_like(x))


def test_third_derivatives_that_torch_gets_wrong_are_refused():
    w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    loss = F.layer_norm(w, (4,)).exp().sum()
    with pytest.raises(MissingDerivative, match=r"linearize\(loss, params\): NativeLayerNorm.*order 3 that"):
        linearize(loss, w, create_graph=True)


def test_row_sparse_gradients_are_refused():
    table = torch.randn(5, 2, requires_grad=True)
    for rows in (F.embedding(torch.tensor([1]), table, sparse=True), embedding(torch.tensor([1]), table)):
        with pytest.raises(ValueError, match=r"the gradient of params\['t'\] is row-sparse"):
            linearize(rows.square().sum(), {"t": table})


def product_of(loss, w):
    """Return a Hessian product of rows, and the number of rows of each call."""
    recorded, sizes = recorded_gradient("test", loss, {"w": w}), []

    def product(rows):
        sizes.append(len(rows) if rows.ndim > 1 else 1)
        return recorded.pull(rows)

    return product, sizes


def test_pull_and_push_are_products_with_the_jacobian():
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    A = torch.randn(5, 3, dtype=torch.float64)
    recorded = Recorded("test", [(A @ w).sin()], {"w": w})
    J = (A @ w.detach()).cos()[:, None] * A
    torch.testing.assert_close(recorded.pull(torch.eye(5).double()), J)
    torch.testing.assert_close(recorded.push(torch.eye(3).double()), J.t())


def test_a_chunk_bounds_the_working_memory():
    torch.manual_seed(0)
    w, x = torch.randn(64, 8, requires_grad=True), torch.randn(200, 64)
    product, _ = product_of((x @ w).tanh().sum(), w)
    vectors = torch.randn(64, w.numel())
    batched = BatchedVjp()
    for chunk in (200_000, 1_000_000):
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            batched.rows(product, vectors, chunk)
        assert counter.peak <= 1.5 * chunk + vectors.nbytes


class Looks(torch.autograd.Function):
    """A function whose derivatives read numbers, which batched tensors do not support."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        assert float(cotangent.detach().sum()) != 7.0
        return cotangent * x.exp()


@pytest.mark.filterwarnings("ignore:.*custom autograd.Function")
@pytest.mark.parametrize("layer", ["custom", "group norm"])
def test_products_that_cannot_be_batched_run_in_turn(layer):
    torch.manual_seed(0)
    w = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def fn(w):
        return (w.exp() if layer == "custom" else F.group_norm(w, 2, eps=0.1)).sin().sum()

    product, _ = product_of(Looks.apply(w).sin().sum() if layer == "custom" else fn(w), w)
    vectors = torch.randn(9, 24, dtype=torch.float64)
    expected = torch.func.jacrev(torch.func.jacrev(fn))(w.detach()).reshape(24, 24)
    found = BatchedVjp().rows(product, vectors, 2**26)
    torch.testing.assert_close(found, vectors @ expected, rtol=1e-9, atol=1e-12)
