"""One gradient's graph, many products: right, in chunks, freed to the byte."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.autograd.derivatives.linearize import linearize
from metagrad.memory.storages import Ledger, StorageMode
from metagrad.sparse import Pattern, RowSparse, Segments, SparseTensor, embedding, gather


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x, y = torch.randn(5, 3, dtype=dtype), torch.randn(5, 2, dtype=dtype)
    return model, lambda: (model(x) - y).square().mean()


def dense_hessian(fn, params):
    """By torch.func, in the order of the dict."""
    shapes = [p.shape for p in params.values()]

    def of_flat(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        return fn({k: part.view(s) for k, part, s in zip(params, parts, shapes, strict=True)})

    return torch.func.jacrev(torch.func.grad(of_flat))(flat(params).detach())


def flat(tree, first=0):
    return torch.cat([t.flatten(first) for t in tree.values()], -1)


def functional(model, fn):
    return lambda params: fn(lambda *args: torch.func.functional_call(model, params, args))


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


def test_products_are_batched_where_they_fit(monkeypatch):
    model, loss = mlp()
    params = dict(model.named_parameters())
    sizes, grad = [], torch.autograd.grad

    def noting(outputs, inputs, grad_outputs, **options):
        sizes.append(len(grad_outputs[0]) if options.get("is_grads_batched") else 1)
        return grad(outputs, inputs, grad_outputs, **options)

    with linearize(loss(), params) as lin:
        monkeypatch.setattr(torch.autograd, "grad", noting)
        lin.hvp(stack_like(params, 20))
        assert sizes == [1, 19]  # the first is measured
        each = lin._together.bytes_each
        sizes.clear()
        lin.hvp(stack_like(params, 20), chunk=9 * each)
        assert sizes == [9, 9, 2]
        sizes.clear()
        lin.hvp(stack_like(params, 4), chunk=3 * each)  # too few to be faster together
        assert sizes == [1] * 4


def test_a_chunk_bounds_the_working_memory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 1))
    params, x = dict(model.named_parameters()), torch.randn(200, 64)
    vs = stack_like(params, 64)
    results = sum(v.nbytes for v in vs.values())
    with linearize(model(x).sin().sum(), params) as lin:
        for chunk in (200_000, 1_000_000):
            with StorageMode(ledger := Ledger(torch.device("cpu"))):
                lin.hvp(vs, chunk=chunk)
            assert ledger.peak <= 1.3 * chunk + results


class Looks(torch.autograd.Function):
    """Its derivatives look at numbers, which nothing that is batched can."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        assert float(cotangent.detach().sum()) != 7.0
        return cotangent * x.exp()


@pytest.mark.parametrize("layer", ["custom", "group norm"])
def test_what_cannot_be_batched_is_multiplied_one_by_one(layer):
    torch.manual_seed(0)
    w = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def fn(w):
        return (w.exp() if layer == "custom" else F.group_norm(w, 2, eps=0.1)).sin().sum()

    loss = Looks.apply(w).sin().sum() if layer == "custom" else fn(w)
    vs = torch.randn(9, *w.shape, dtype=torch.float64)
    with linearize(loss, w) as lin:
        found = lin.hvp(vs)
    expected = torch.func.jacrev(torch.func.jacrev(fn))(w.detach()).reshape(24, 24)
    torch.testing.assert_close(found.view(9, 24), vs.view(9, 24) @ expected, rtol=1e-9, atol=1e-12)


def test_any_tree_serves_for_parameters():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    b = torch.tensor(3.0, requires_grad=True)
    with linearize((w**3).sum() * b, [w, (b,)]) as lin:
        assert lin.gradient[0].tolist() == [9.0, 36.0]
        (to_w, (to_b,)) = lin.hvp([torch.tensor([1.0, 0.0]), (torch.tensor(1.0),)])
    assert to_w.tolist() == [21.0, 12.0]
    assert to_b.item() == 3.0
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


def test_of_a_linear_loss_products_are_zero():
    w = torch.ones(2, requires_grad=True)
    with linearize(3 * w.sum(), {"w": w}) as lin:
        assert lin.gradient["w"].tolist() == [3.0, 3.0]
        assert lin.hvp({"w": torch.ones(5, 2)})["w"].tolist() == [[0.0, 0.0]] * 5


def test_checkpoints():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2)).double()
    x, params = torch.randn(5, 3, dtype=torch.float64), dict(model.named_parameters())
    vs = stack_like(params, 7)

    def products(call):
        torch.manual_seed(1)
        with linearize(call(x).sin().sum(), params) as lin:
            return flat(lin.hvp(vs), 1)

    expected = products(model)
    torch.testing.assert_close(products(lambda x: mg.checkpoint(model, x)), expected)
    by_torch = products(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    torch.testing.assert_close(by_torch, expected)


# Embedding tables


def tables(kind, num_rows=50):
    torch.manual_seed(0)
    table = nn.Embedding(num_rows, 3, sparse=kind == "torch, sparse", padding_idx=5).double()
    head = nn.Linear(3, 2).double()
    ids = torch.tensor([[1, 5], [5, 7], [7, 40]])

    def loss(params):
        if kind == "metagrad":
            looked_up = embedding(ids, params["table"], padding_idx=5)
        else:
            looked_up = F.embedding(ids, params["table"], padding_idx=5, sparse=kind == "torch, sparse")
        again = F.embedding(torch.tensor(1), params["table"], sparse=True)
        return (looked_up @ params["head"].t()).tanh().square().sum() + again.pow(3).sum()

    return {"table": table.weight, "head": head.weight}, loss


@pytest.mark.parametrize("kind", ["torch, sparse", "metagrad", "torch, dense, declared"])
def test_tables_are_differentiated_in_the_rows_looked_up(kind):
    params, loss = tables(kind)
    declared = ["table"] if "declared" in kind else []
    constants = {key: p.detach() for key, p in params.items()}

    def dense(p):
        # The padding is a constant.
        table = torch.cat([p["table"][:5], constants["table"][5:6], p["table"][6:]])
        ids = torch.tensor([[1, 5], [5, 7], [7, 40]])
        return (table[ids] @ p["head"].t()).tanh().square().sum() + table[1].pow(3).sum()

    expected = dense_hessian(dense, constants)
    rows, width = torch.tensor([1, 7, 40]), 3
    vector = RowSparse(rows[1:], torch.randn(2, 3, dtype=torch.float64), (50, 3))
    direction = torch.randn(2, 3, dtype=torch.float64)
    with linearize(loss(params), params, sparse=declared) as lin:
        found = lin.hvp({"table": vector, "head": direction})
        stacked = RowSparse(
            torch.cat([rows[1:] + 50 * i for i in range(6)]),
            torch.cat([vector.values * i for i in range(6)]),
            (6, 50, 3),
        )
        many = lin.hvp({"table": stacked, "head": torch.stack([direction * i for i in range(6)])})
    assert lin.gradient["table"].rows.tolist() == found["table"].rows.tolist() == rows.tolist()
    whole = torch.cat([vector.to_dense().flatten(), direction.flatten()]) @ expected
    torch.testing.assert_close(found["table"].to_dense().flatten(), whole[: 50 * width])
    torch.testing.assert_close(found["head"].flatten(), whole[50 * width :])
    torch.testing.assert_close(many["table"].to_dense()[4], 4 * found["table"].to_dense())
    torch.testing.assert_close(many["head"][4], 4 * found["head"])


@pytest.mark.parametrize("kind", ["torch, sparse", "metagrad", "torch, dense, declared"])
def test_nothing_is_as_large_as_a_table(kind):
    params, loss = tables(kind, num_rows=10**5)
    value = loss(params)
    vs = {
        "table": RowSparse(torch.tensor([1]), torch.ones(1, 3).double(), (10**5, 3)),
        "head": torch.ones(2, 3).double(),
    }
    declared = ["table"] if "declared" in kind else []
    with (
        StorageMode(ledger := Ledger(torch.device("cpu"))),
        linearize(value, params, sparse=declared) as lin,
    ):
        lin.hvp(vs)
    assert ledger.peak < 10_000


def test_third_derivatives_of_tables():
    params, loss = tables("torch, sparse")
    rows = torch.tensor([1, 7, 40])
    v = {"table": torch.randn(3, 3, dtype=torch.float64), "head": torch.randn(2, 3, dtype=torch.float64)}

    def product(table, head):
        params = {"table": table, "head": head}
        vector = {"table": RowSparse(rows, v["table"], (50, 3)), "head": v["head"]}
        with linearize(loss(params), params, sparse=["table"], create_graph=True) as lin:
            found = lin.hvp(vector)
        return found["table"].values, found["head"]

    def dense_loss(rows_of, head):
        places, padding = torch.tensor([[0, 3], [3, 1], [1, 2]]), torch.zeros(1, 3, dtype=torch.float64)
        whole = torch.cat([rows_of, params["table"].detach()[5:6] + padding])
        return (whole[places] @ head.t()).tanh().square().sum() + rows_of[0].pow(3).sum()

    found = product(params["table"], params["head"])
    total = found[0].pow(3).sum() + found[1].pow(3).sum()
    to_table, to_head = torch.autograd.grad(total, [params["table"], params["head"]])
    small = [params["table"].detach()[rows].requires_grad_(), params["head"].detach().requires_grad_()]
    first = torch.autograd.grad(dense_loss(*small), small, create_graph=True)
    second = torch.autograd.grad(first, small, [v["table"], v["head"]], create_graph=True)
    third = torch.autograd.grad(second[0].pow(3).sum() + second[1].pow(3).sum(), small)
    torch.testing.assert_close(to_table.to_dense()[rows], third[0])
    torch.testing.assert_close(to_head, third[1])


def test_a_gather_by_segments_is_no_lookup_of_a_table():
    w = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64, requires_grad=True)
    segments = Segments(torch.tensor([0, 2, 2]), 3)
    with linearize((gather(w, segments) ** 3).sum(), {"w": w}) as lin:
        product = lin.hvp({"w": torch.ones_like(w)})["w"]
    assert product.tolist() == [[6.0], [0.0], [36.0]]  # 6 w for each entry that is gathered


def test_a_declared_table_must_only_be_looked_up():
    table = torch.randn(5, 2, requires_grad=True)
    loss = F.embedding(torch.tensor([1]), table).sum() + (table**2).sum()
    with pytest.raises(ValueError, match=r"params\['t'\], declared sparse, by PowBackward0.*Leave it out"):
        linearize(loss, {"t": table}, sparse=["t"])
    with linearize(loss, {"t": table}) as lin:  # undeclared, it is taken as a whole
        assert lin.hvp({"t": torch.ones(5, 2)})["t"].tolist() == [[2.0, 2.0]] * 5
    scaled = F.embedding(torch.tensor([1]), table, scale_grad_by_freq=True).square().sum()
    with pytest.raises(ValueError, match="scale_grad_by_freq=True"):
        linearize(scaled, {"t": table}, sparse=["t"])
    with pytest.raises(ValueError, match=r"sparse names params\['u'\]"):
        linearize(loss, {"t": table}, sparse=["u"])
    with pytest.raises(TypeError, match="got the string 't'"):
        linearize(loss, {"t": table}, sparse="t")
    with pytest.raises(
        ValueError, match=r"gradient of params\['t'\] is sparse, but rows are looked up in a tensor"
    ):
        linearize(embedding(torch.tensor([1]), table.view(5, 2)).square().sum(), {"t": table})


def test_vectors_of_tables_are_checked():
    table = torch.randn(5, 2, requires_grad=True)
    with linearize(embedding(torch.tensor([1, 3]), table).square().sum(), {"t": table}) as lin:
        with pytest.raises(TypeError, match=r"v\['t'\] must be a RowSparse.*got Tensor"):
            lin.hvp({"t": torch.ones(5, 2)})
        with pytest.raises(ValueError, match=r"v\['t'\] must have shape \(5, 2\), got \(6, 2\)"):
            lin.hvp({"t": RowSparse(torch.tensor([1]), torch.ones(1, 2), (6, 2))})
        with pytest.raises(ValueError, match="rows that the loss does not look up"):
            lin.hvp({"t": RowSparse(torch.tensor([2]), torch.ones(1, 2), (5, 2))})


def test_a_table_that_is_only_padding_has_no_rows():
    table = torch.randn(5, 2, requires_grad=True)
    loss = F.embedding(torch.tensor([1]), table, padding_idx=1, sparse=True).square().sum()
    with linearize(loss, {"t": table}) as lin:
        assert lin.gradient["t"].rows.tolist() == []
        assert lin.hvp({"t": lin.gradient["t"]})["t"].rows.tolist() == []


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
        with linearize(loss, params) as lin:
            return lin.hvp(dict(zip(names, vs, strict=True)), create_graph=True)

    inputs = (inputs, [v.requires_grad_() for v in vs], x.requires_grad_())
    assert mg.gradcheck(products, inputs, order=1, directions=1)
    assert mg.gradcheck(lambda p: products(p, vs, x), (inputs[0],), order=2, directions=1)


def test_every_gradient_still_requires_grad():
    model, loss = mlp()
    params = dict(model.named_parameters())
    with linearize(loss(), params, create_graph=True) as lin:
        assert all(g.requires_grad for g in lin.gradient.values())
        found = lin.hvp(stack_like(params, 9))
        assert all(t.requires_grad for t in found.values())
        assert not any(t.requires_grad for t in lin.hvp(stack_like(params, 9), create_graph=False).values())
    with linearize(loss(), params) as lin, torch.no_grad():
        assert not any(g.requires_grad for g in lin.gradient.values())
        assert all(t.requires_grad for t in lin.hvp(stack_like(params, 9), create_graph=True).values())
        assert not any(t.requires_grad for t in lin.hvp(stack_like(params, 9)).values())


def test_third_derivatives_that_torch_gets_wrong_are_refused():
    w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def loss():
        return F.layer_norm(w, (4,)).exp().sum()

    with pytest.raises(
        MissingDerivative,
        match=r"linearize\(loss, params\): NativeLayerNorm.*order 3 that are silently wrong",
    ):
        linearize(loss(), w, create_graph=True)
    with linearize(loss(), w) as lin:
        lin.hvp(torch.ones_like(w))
        with pytest.raises(MissingDerivative, match=r"create_graph=True\): NativeLayerNorm"):
            lin.hvp(torch.ones_like(w), create_graph=True)


# Life


def graph_loss(params):
    x = torch.linspace(0, 1, 300).view(100, 3)
    return (torch.tanh(x @ params["w"]) @ params["u"]).square().sum()


def test_the_graph_is_freed_to_the_byte():
    params = {"w": torch.randn(3, 50, requires_grad=True), "u": torch.randn(50, requires_grad=True)}
    vs = stack_like(params, 6)
    gc.disable()
    try:
        with StorageMode(ledger := Ledger(torch.device("cpu"))):
            with linearize(graph_loss(params), params) as lin:
                lin.hvp(vs)
                assert ledger.total > 40_000
            held = sum(g.nbytes for g in lin.gradient.values()) + lin.loss.nbytes
            assert ledger.total == held
            del lin
            assert ledger.total == 0
    finally:
        gc.enable()


def test_the_graph_is_freed_after_an_exception():
    params = {"w": torch.randn(3, 50, requires_grad=True), "u": torch.randn(50, requires_grad=True)}
    with StorageMode(ledger := Ledger(torch.device("cpu"))):
        lin = linearize(graph_loss(params), params, create_graph=True)
        lin.hvp(stack_like(params, 6))
        with pytest.raises(KeyError), lin:
            raise KeyError
        held = sum(g.nbytes for g in lin.gradient.values()) + lin.loss.nbytes
        assert ledger.total == held
        assert not any(g.requires_grad for g in lin.gradient.values())


def test_only_what_linearize_made_is_freed():
    w = torch.randn(4, requires_grad=True)
    loss = w.sin().sum()
    with linearize(loss, w):
        pass
    torch.testing.assert_close(torch.autograd.grad(loss, w)[0], w.detach().cos())


def test_five_thousand_products_leak_nothing():
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    v, vs = torch.ones(2), torch.ones(100, 2)
    with linearize(w.exp().sum(), w) as lin, StorageMode(ledger := Ledger(torch.device("cpu"))):
        lin.hvp(v)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(500):
            lin.hvp(v)
        for _ in range(45):
            lin.hvp(vs)
        assert ledger.total == 0
        gc.collect()
        assert len(gc.get_objects()) - before < 50


# Errors


def test_the_loss_must_be_one_number_with_a_graph_to_every_parameter():
    w, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"linearize\(loss, params\): loss must have one element, got shape \(2,\)"
    ):
        linearize(w * 2, {"w": w})
    with pytest.raises(TypeError, match=r"linearize\(loss, params\): loss must be a tensor, got float"):
        linearize(1.0, {"w": w})
    with pytest.raises(ValueError, match=r"linearize\(loss, params\): the loss has no graph"):
        linearize(w.detach().sum(), {"w": w})
    with pytest.raises(
        ValueError, match=r"does not depend on params\['b'\]. Leave it out of params, or pass allow_unused"
    ):
        linearize((w**2).sum(), {"w": w, "b": b})
    with pytest.raises(ValueError, match=r"params\['w'\] does not require grad"):
        linearize((b**2).sum(), {"w": w.detach()})
    with pytest.raises(TypeError, match=r"params\['w'\] must be a tensor, got float"):
        linearize((b**2).sum(), {"w": 1.0})
    with pytest.raises(ValueError, match="there are no parameters"):
        linearize((b**2).sum(), {})


def test_unused_parameters_have_zeros_on_request():
    w, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    with linearize((w**2).sum(), {"w": w, "b": b}, allow_unused=True) as lin:
        assert lin.gradient["b"].tolist() == [0.0] * 3
        found = lin.hvp({"w": torch.ones(5, 2), "b": torch.ones(5, 3)})
    assert found["b"].tolist() == [[0.0] * 3] * 5
    assert found["w"].tolist() == [[2.0] * 2] * 5


def test_vectors_are_checked():
    w = torch.ones(2, requires_grad=True)
    with linearize((w**2).sum(), {"w": w}) as lin:
        with pytest.raises(ValueError, match="v must have the structure of the parameters"):
            lin.hvp([torch.ones(2)])
        with pytest.raises(
            ValueError, match=r"v\['w'\] must be as its parameter is.*got \(\(3,\), torch.float32\)"
        ):
            lin.hvp({"w": torch.ones(3)})
        with pytest.raises(ValueError, match=r"got \(\(2,\), torch.float64\)"):
            lin.hvp({"w": torch.ones(2, dtype=torch.float64)})
        with pytest.raises(TypeError, match=r"v\['w'\] must be a strided tensor, got float"):
            lin.hvp({"w": 1.0})
        with pytest.raises(ValueError, match="all stacks of as many"):
            lin.hvp({"w": torch.ones(0, 2)})
        with pytest.raises(ValueError, match="chunk must be bytes"):
            lin.hvp({"w": torch.ones(2)}, chunk="auto")
    b = torch.ones(2, requires_grad=True)
    with (
        linearize((w * b).sum(), [w, b]) as lin,
        pytest.raises(ValueError, match="all vectors, or all stacks"),
    ):
        lin.hvp([torch.ones(2), torch.ones(3, 2)])


def test_closed_is_closed():
    w = torch.ones(2, requires_grad=True)
    lin = linearize((w**2).sum(), {"w": w})
    lin.close()
    lin.close()
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


def test_finite_products_whose_sum_overflows_are_finite():
    w = torch.ones(4, requires_grad=True)
    with linearize((w**2).sum(), w) as lin:
        assert lin.hvp(torch.full((4,), 1e38)).isfinite().all()


def test_missing_derivatives_are_named():
    x = torch.rand(3, 2, requires_grad=True)
    with pytest.raises(
        MissingDerivative, match=r"HardsigmoidBackward0, from F\.hardsigmoid, raises an error"
    ):
        linearize(F.hardsigmoid(x).sum(), x)

    class Once(torch.autograd.Function):
        """Calls, in its backward, what has no derivative."""

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
        pytest.raises(MissingDerivative, match="no second derivative: derivative for"),
    ):
        lin.hvp(torch.ones_like(x))


def test_mixed_derivatives_are_those_of_the_tape():
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    o = torch.randn(3, dtype=torch.float64, requires_grad=True)
    unused = torch.zeros(2, requires_grad=True)
    loss = (w.sin() * o.exp() * w).sum()
    v = torch.randn(3, dtype=torch.float64)
    with mg.autograd.linearize(loss, {"w": w}) as lin:
        found, nothing = lin.mixed([v], [o, unused])
        (slope,) = lin.gradient_on_tape()
        (again,) = torch.autograd.grad(slope @ v, o, retain_graph=True)
    expected = (w.sin() + w * w.cos()) * o.exp() * v
    assert nothing is None
    assert not found.requires_grad
    assert torch.allclose(found, expected)
    assert torch.allclose(again, expected)
    with pytest.raises(ValueError, match="closed"):
        lin.mixed([v], [o])


def test_a_linear_loss_has_no_mixed_derivatives():
    w, o = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with mg.autograd.linearize((w * 3).sum() + o.sum(), {"w": w}) as lin:
        assert lin.mixed([torch.ones(2)], [o]) == [None]
