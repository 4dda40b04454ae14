"""The Hessian against closed forms and dense oracles, on models, tables, batches, in every mode."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import metagrad as mg
from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.curvature.operators.hessian import hessian
from metagrad.curvature.operators.space import ParameterSpace
from metagrad.memory.storages import Ledger, StorageMode
from metagrad.sparse import Pattern, RowSparse, SparseTensor
from tests.losses import loss_of
from tests.marks import slow


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def dense(loss_fn, params, *args):
    space = ParameterSpace(params)
    point = space.flatten({k: p.detach() for k, p in params.items()})
    # Not torch.func.hessian: jacrev of a gradient with layer_norm or batch_norm is wrong (torch 2.13).
    return torch.func.jacfwd(torch.func.grad(lambda flat: loss_fn(space.unflatten(flat), *args)))(point)


def close(found, expected, tolerance=1e-9):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def with_params(model, loss_fn):
    return lambda params, x, y: loss_fn(torch.func.functional_call(model, params, (x,)), y)


def squares(prediction, y):
    return (prediction - y).square().mean()


# Closed forms


def test_quadratic():
    A = draw(4, 4)
    A, x = A + A.t(), draw(4).requires_grad_()
    with hessian(x @ A @ x / 2 + x.sum(), {"x": x}) as H:
        close(H.to_dense(), A)
        close(H.gradient, A @ x.detach() + 1)
        close(H.loss, (x @ A @ x / 2 + x.sum()).detach())
        assert repr(H) == "HessianOperator(shape=(4, 4), dtype=torch.float64)"


def test_linear_regression():
    X, y, w = draw(7, 3), draw(7), draw(3)
    with hessian(lambda p, X, y: (X @ p["w"] - y).square().mean(), {"w": w}, (X, y)) as H:
        close(H.to_dense(), 2 / 7 * X.t() @ X)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_logistic_regression(mode):
    X, w = draw(7, 3), draw(3)
    y = (draw(7) > 0).double()
    s = (X @ w).sigmoid()
    expected = X.t() @ ((s * (1 - s)).unsqueeze(1) * X) / 7
    with hessian(lambda p: F.binary_cross_entropy_with_logits(X @ p["w"], y), {"w": w}, mode=mode) as H:
        close(H.to_dense(), expected, 1e-8)


# Models


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        with sdpa_kernel(SDPBackend.MATH):
            return self.head(self.layer(x).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), draw(5, 3)


def cnn():
    layers = [
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.Softplus(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 2)), draw(3, 1, 6, 6)


def transformer():
    return Block(), draw(2, 3, 4)


@pytest.mark.parametrize("make", [mlp, cnn, transformer])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_models_against_the_dense_hessian(make, mode):
    torch.manual_seed(0)
    model, x = make()
    model, y = model.double(), torch.tensor([0, 1, 1, 0, 1])[: len(x)]
    params = {k: p.detach() for k, p in model.named_parameters()}
    loss_fn = with_params(model, F.cross_entropy)
    expected = dense(loss_fn, params, x, y)
    with hessian(loss_fn, params, (x, y), mode=mode) as H:
        if mode == "reverse":
            close(H.to_dense(), expected)
        vectors = draw(2, H.shape[0])
        close(H.products(vectors), vectors @ expected, 1e-9)
        name = list(params)[2]
        part = H.space.slices[name]
        block = H[name]
        assert block.shape == (params[name].numel(),) * 2
        vectors = draw(2, block.shape[0])
        close(block.products(vectors), vectors @ expected[part, part], 1e-6)
        layer = H[name.rpartition(".")[0]]
        assert layer.space.names == [n for n in params if n.startswith(name.rpartition(".")[0] + ".")]


def test_the_closure_of_a_module():
    torch.manual_seed(0)
    model, x = mlp()
    model, y, params = model.double(), draw(5, 2), None
    params = dict(model.named_parameters())
    expected = dense(with_params(model, squares), params, x, y)
    v = draw(expected.shape[0])
    for loss in (
        lambda: squares(model(x), y),
        lambda x=x: squares(model(x), y),
        lambda p: squares(model(x), y),
    ):
        with hessian(loss, params) as H:
            close(H @ v, expected @ v)
    with hessian(lambda p, x, y: squares(model(x), y), params, (x, y)) as H:
        close(H @ v, expected @ v)


def test_checkpointed_modules():
    torch.manual_seed(0)
    model, x = mlp()
    model, y = model.double(), draw(5, 2)
    params = dict(model.named_parameters())
    expected = dense(with_params(model, squares), params, x, y)
    vectors = draw(6, expected.shape[0])
    with hessian(squares(mg.checkpoint(model, x), y), params) as H:
        close(H.products(vectors), vectors @ expected)

    def checkpointed(p, x):
        return torch.utils.checkpoint.checkpoint(lambda w: (x @ w).sin(), p["w"], use_reentrant=False).sum()

    with pytest.raises(MissingDerivative, match=r"torch\.func does not run this loss|no forward derivative"):
        hessian(checkpointed, {"w": draw(3)}, (x,), mode="forward") @ draw(3)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_sparse_tensors(mode):
    pattern = Pattern(torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2]), (3, 3))
    a, b, x = SparseTensor(pattern, draw(3)), draw(3), draw(3)

    def of_values(values, b):
        return (SparseTensor(pattern, values) @ x + b).sin().sum()

    expected = dense(lambda p: of_values(p["a"], p["b"]), {"a": a.values, "b": b})
    with hessian(lambda p: of_values(p["a"].values, p["b"]), {"a": a, "b": b}, mode=mode) as H:
        close(H.to_dense(), expected, 1e-8)
        found = H @ {"a": a, "b": b}
        assert found["a"].pattern is pattern
        close(found["a"].values, (expected @ torch.cat([a.values, b]))[:3], 1e-8)


# Embedding tables


def tables(num_rows=30):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(num_rows, 2, sparse=True, padding_idx=0), nn.Linear(2, 2)).double()
    ids = torch.tensor([[3, 0, 7], [7, 9, 0]])
    return model, dict(model.named_parameters()), ids


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_tables_have_the_rows_looked_up_for_coordinates(mode):
    model, params, ids = tables()
    rows = torch.tensor([3, 7, 9])

    def loss_fn(params, ids):
        return torch.func.functional_call(model, params, (ids,)).sin().square().sum()

    def of_rows(p):
        looked_up = torch.cat([p["rows"], params["0.weight"].detach()[:1]])[
            torch.tensor([[0, 3, 1], [1, 2, 3]])
        ]
        return F.linear(looked_up, p["w"], p["b"]).sin().square().sum()

    small = {"rows": params["0.weight"][rows], "w": params["1.weight"], "b": params["1.bias"]}
    expected = dense(of_rows, small)
    with hessian(loss_fn, params, (ids,), mode=mode) as H:
        close(H.to_dense(), expected, 1e-8)
        assert H.space.entries[0].rows.tolist() == rows.tolist()
        v = {**params, "0.weight": RowSparse(rows[:1], draw(1, 2), (30, 2))}
        found = H @ v
        assert isinstance(found["0.weight"], RowSparse)
        close(H.space.flatten(found), expected @ H.space.flatten(v), 1e-8)


def test_nothing_is_as_large_as_a_table():
    model, params, ids = tables(num_rows=10**5)
    with StorageMode(ledger := Ledger(torch.device("cpu"))), hessian(model(ids).sin().sum(), params) as H:
        H.trace(probes=8, method="hutchinson")
        H.diagonal(probes=8)
    assert ledger.peak < 20_000


def test_tables_in_batches():
    model, params, _ = tables()
    batches = [(torch.tensor([[3, 7]]),), (torch.tensor([[9, 3], [0, 4]]),)]

    def loss_fn(params, ids):
        return torch.func.functional_call(model, params, (ids,)).sin().square().mean()

    with hessian(loss_fn, params, batches, sparse=["0.weight"]) as H:
        assert H.space.entries[0].rows.tolist() == [3, 4, 7, 9]
        v = draw(H.shape[0])
        found = H @ v
    tree = {k: t.to_dense() if isinstance(t, RowSparse) else t for k, t in H.space.unflatten(v).items()}
    total = torch.zeros_like(v)
    for (ids,) in batches:
        product = mg.hvp(
            lambda p, ids=ids: loss_fn({**p, "0.weight": p["0.weight"]}, ids),
            {k: p.detach() for k, p in params.items()},
            tree,
        ).product
        product["0.weight"] = RowSparse(
            torch.tensor([3, 4, 7, 9]), product["0.weight"].to_dense()[[3, 4, 7, 9]], (30, 2)
        )
        total += len(ids) / 3 * H.space.flatten(product)
    close(found, total)


# Batches


# Modes


def test_every_evaluation_draws_the_same_random_numbers():
    x, w = draw(4, 3), draw(3)

    def loss_fn(p, x):
        return F.dropout(x * p["w"], 0.5).sin().sum()

    found = []
    for mode in ("reverse", "forward"):
        torch.manual_seed(3)
        with hessian(loss_fn, {"w": w}, (x,), mode=mode) as H:
            torch.rand(5)
            state = torch.get_rng_state()
            found.append(H.to_dense())
            assert torch.equal(torch.get_rng_state(), state)
    close(found[0], found[1])


def test_what_torch_lacks_is_named():
    w = draw(3).requires_grad_()
    with pytest.raises(MissingDerivative, match="HardsigmoidBackward0"):
        hessian(F.hardsigmoid(w).sum(), {"w": w})


# Third derivatives


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_products_can_be_differentiated(mode):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.GroupNorm(1, 2)).double(), draw(4, 3)
    loss, names = (
        loss_of(model, lambda z, y: (z - y).square().sum()),
        [n for n, _ in model.named_parameters()],
    )

    def products(params, v, y):
        params = dict(zip(names, params, strict=True))
        with hessian(loss, params, (x, y), mode=mode, create_graph=True) as H:
            return H @ v, H.gradient, H.loss

    params = [(p.detach() + 0.1).requires_grad_() for p in model.parameters()]
    v = draw(sum(p.numel() for p in params)).requires_grad_()
    results = products(params, v, draw(4, 2))
    assert all(result.requires_grad for result in results)
    assert mg.gradcheck(products, (params, v, draw(4, 2).requires_grad_()), order=1, directions=1)


def test_order_three():
    x = draw(4, 3)

    def product(w):
        with hessian(lambda p: (x @ p["w"]).tanh().exp().sum(), {"w": w}, create_graph=True) as H:
            return H @ torch.ones(3, dtype=torch.float64)

    assert mg.gradcheck(product, draw(3).requires_grad_(), order=3)


def test_the_hessian_of_a_maml_objective():
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
        draw(5, 2),
        draw(5, 1),
    )
    params = {k: p.detach() for k, p in model.named_parameters()}
    inner = with_params(model, lambda z, y: (z - y).square().mean())

    def objective(p, x, y):
        grads = mg.grad(inner(p, x, y), p, create_graph=True)
        return inner({k: p[k] - 0.1 * g for k, g in grads.items()}, x.flip(0), y)

    def by_func(p, x, y):
        grads = torch.func.grad(inner)(p, x, y)
        return inner({k: p[k] - 0.1 * g for k, g in grads.items()}, x.flip(0), y)

    expected = dense(by_func, params, x, y)
    with hessian(objective, params, (x, y)) as H:
        close(H.to_dense(), expected, 1e-8)
        low, high = H.trace(
            method="hutchinson", probes=200, generator=torch.Generator().manual_seed(0)
        ).interval(0.999)
    assert low < expected.trace() < high


def test_norms_with_wrong_third_derivatives_are_refused():
    """Of torch's own: those of a function that is evaluated for its tape are ours."""
    w = draw(3, 4).requires_grad_()

    def loss_fn(params):
        return F.layer_norm(params["w"], (4,)).exp().sum()

    for loss, mode in ((loss_fn({"w": w}), "reverse"), (loss_fn, "forward")):
        with pytest.raises(MissingDerivative, match="layer_norm"):
            hessian(loss, {"w": w}, mode=mode, create_graph=True) @ draw(12)


def test_without_grad_nothing_is_on_the_tape():
    w = draw(3).requires_grad_()
    for mode in ("reverse", "forward"):
        with hessian(lambda p: p["w"].exp().sum(), {"w": w}, mode=mode, create_graph=True) as H:
            with torch.no_grad():
                assert not (H @ draw(3)).requires_grad
            assert (H @ draw(3)).requires_grad


# Life and errors


def test_the_graph_is_freed_after_an_exception():
    w = torch.randn(100, requires_grad=True)
    gc.disable()
    try:
        with StorageMode(ledger := Ledger(torch.device("cpu"))):
            with pytest.raises(KeyError), hessian(w.sin().exp().sum(), {"w": w}, create_graph=True) as H:  # noqa: PT012
                assert ledger.total > 1500
                H @ torch.ones(100)
                raise KeyError
            assert ledger.total == H.loss.nbytes + H.gradient.nbytes
        with pytest.raises(ValueError, match="H is closed"):
            H["w"] @ torch.ones(100)
    finally:
        gc.enable()


def test_bad_losses():
    w, b = draw(3).requires_grad_(), draw(3).requires_grad_()
    with pytest.raises(
        ValueError, match=r"hessian\(loss, params\): loss must have one element, got shape \(3,\)"
    ):
        hessian(w * 2, {"w": w})
    with pytest.raises(ValueError, match=r"does not depend on params\['b'\]"):
        hessian(w.sin().sum(), {"w": w, "b": b})
    with pytest.raises(ValueError, match=r"does not depend on params\['b'\]"):
        hessian(lambda p: p["w"].sin().sum(), {"w": w, "b": b}, mode="forward")
    with hessian(w.sin().sum(), {"w": w, "b": b}, allow_unused=True) as H:
        close(H.to_dense()[3:], torch.zeros(3, 6).double())
    with pytest.raises(TypeError, match="loss must be a tensor or a function, got float"):
        hessian(1.0, {"w": w})
    with pytest.raises(TypeError, match="expected a dict of parameters"):
        hessian(w.sum(), [w])
    H = hessian(lambda p: p["w"].norm(), {"w": torch.zeros(3).double()})
    with pytest.raises(ValueError, match="the product has nan or inf in the entry of 'w'"):
        H @ draw(3)


def test_bad_arguments():
    w = draw(3).requires_grad_()
    fn = lambda p: p["w"].sin().sum()  # noqa: E731
    with pytest.raises(ValueError, match="mode must be one of reverse, forward, got 'x'"):
        hessian(fn, {"w": w}, mode="x")
    for loss in (fn({"w": w}), lambda: fn({"w": w})):
        with pytest.raises(
            ValueError, match=r"mode='forward' evaluates the loss at other points: pass it as a function"
        ):
            hessian(loss, {"w": w}, mode="forward")
    with pytest.raises(ValueError, match="data goes with a loss function"):
        hessian(fn({"w": w}), {"w": w}, (draw(3),))
    with pytest.raises(ValueError, match="loss takes no arguments, so data has nowhere to go"):
        hessian(lambda: fn({"w": w}), {"w": w}, (draw(3),))
    with pytest.raises(ValueError, match="chunk must be bytes"):
        hessian(fn, {"w": w}, chunk="all")
    with pytest.raises(ValueError, match=r"H\['v'\]: no parameter has this name"):
        hessian(fn, {"w": w})["v"]


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_parameters_without_dimensions(mode):
    """L = a^3 + a |b|^2, with a 0-d and b of two."""
    params = {
        "a": torch.tensor(2.0, dtype=torch.float64, requires_grad=True),
        "b": torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True),
    }
    expected = torch.tensor([[12.0, 2.0, 6.0], [2.0, 4.0, 0.0], [6.0, 0.0, 4.0]], dtype=torch.float64)
    with mg.hessian(lambda p: p["a"] ** 3 + p["a"] * p["b"].square().sum(), params, mode=mode) as H:
        torch.testing.assert_close(H.to_dense(), expected, rtol=1e-7, atol=1e-7)
        product = H @ {"a": torch.tensor(1.0).double(), "b": torch.zeros(2).double()}
        torch.testing.assert_close(product["a"], expected[0, 0], rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(H["a"].to_dense(), expected[:1, :1], rtol=1e-7, atol=1e-7)


def test_mixed_derivatives_need_the_graph():
    w, o = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with mg.hessian((o * w**2).sum(), {"w": w}) as H:
        assert torch.equal(H.mixed(torch.ones(2), [o])[0], torch.tensor(4.0))
    with (
        mg.hessian(lambda p: (o * p["w"] ** 2).sum(), {"w": w}, mode="forward") as H,
        pytest.raises(ValueError, match=r'mixed\(vector, others\): pass mode="reverse"'),
    ):
        H.mixed(torch.ones(2), [o])


# Compiled products


EAGER = {"backend": "eager"}


def regression(activation=torch.tanh):
    x, y = draw(6, 3), draw(6)
    params = {"W": draw(4, 3), "b": draw(4), "w": draw(4)}

    def loss_fn(params, x, y):
        return (activation(x @ params["W"].t() + params["b"]) @ params["w"] - y).square().mean()

    return loss_fn, params, (x, y)


@pytest.mark.parametrize(
    ("mode", "backend"), [("reverse", "eager"), slow("forward", "eager"), slow("reverse", "aot_eager")]
)
def test_compiled_products_are_those_of_the_dense_hessian(mode, backend):
    torch.manual_seed(0)
    loss_fn, params, batch = regression()
    expected = dense(loss_fn, params, *batch)
    with hessian(loss_fn, params, batch, mode=mode, compile={"backend": backend}) as H:
        close(H.to_dense(), expected)
        vector = {name: draw(*p.shape) for name, p in params.items()}
        close(H.space.flatten(H @ vector), expected @ H.space.flatten(vector))
        close(H["w"].to_dense(), expected[-4:, -4:])
        gradient = torch.func.grad(loss_fn)(params, *batch)
        close(H.gradient, H.space.flatten(gradient))
        assert not (H @ torch.ones(20, dtype=torch.float64, requires_grad=True)).requires_grad
    with pytest.raises(ValueError, match="H is closed"):
        H @ vector


@pytest.mark.slow
def test_products_of_compiled_kernels():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    model = model.eval().double().to(memory_format=torch.channels_last)
    params = dict(model.named_parameters())
    loss_fn = with_params(model, F.cross_entropy)
    batch = draw(5, 3, 4, 4), torch.randint(3, (5,))
    with hessian(loss_fn, params, batch, compile=True) as H:
        close(H.to_dense(), dense(loss_fn, params, *batch))


def test_compiled_products_fall_back_on_reverse_mode():
    """torch has no forward derivative of F.huber_loss."""
    torch.manual_seed(0)
    _, params, (x, y) = regression()

    def loss_fn(params, x, y):
        return F.huber_loss(torch.tanh(x @ params["W"].t() + params["b"]) @ params["w"], y)

    with hessian(loss_fn, params, (x, y), compile=EAGER) as H, hessian(loss_fn, params, (x, y)) as expected:
        close(H.to_dense(), expected.to_dense())
    with pytest.raises(MissingDerivative, match=r"the product cannot be compiled: .* Leave compile out"):
        hessian(loss_fn, params, (x, y), mode="forward", compile=EAGER)


def test_compiled_products_draw_the_same_random_numbers():
    torch.manual_seed(0)
    loss_fn, params, batch = regression(lambda z: F.dropout(z.exp()))
    state = torch.get_rng_state()
    expected = hessian(loss_fn, params, batch).to_dense()
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    close(hessian(loss_fn, params, batch, compile=EAGER).to_dense(), expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_compiled_products_cast_as_the_loss_did():
    torch.manual_seed(0)
    loss_fn, params, batch = regression()
    params, batch = {name: p.float() for name, p in params.items()}, tuple(part.float() for part in batch)

    def cast(params, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(params, x, y)

    vector = torch.ones(20)
    expected = hessian(cast, params, batch, mode="forward") @ vector
    compiled = hessian(cast, params, batch, compile=EAGER)
    close(compiled @ vector, expected)
    with torch.autocast("cpu", torch.bfloat16):
        close(compiled @ vector, expected)


@pytest.mark.slow
def test_a_custom_function_is_not_compiled():
    """torch 2.13 cannot make a graph of the derivatives of an autograd.Function that writes into nothing."""
    A = SparseTensor(Pattern(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), (2, 3)), draw(3))

    def loss_fn(params, x):
        return (params["A"] @ x).pow(3).sum()

    with pytest.raises(ValueError, match=r"the product cannot be compiled: .* Leave compile out"):
        hessian(loss_fn, {"A": A}, (draw(3, 2),), compile=EAGER)


def test_what_cannot_be_compiled_is_refused():
    loss_fn, params, batch = regression()
    wanted = {name: p.clone().requires_grad_() for name, p in params.items()}
    with pytest.raises(ValueError, match=r"compile takes the loss as a function of \(params, \*data\)"):
        hessian(loss_fn(wanted, *batch), wanted, compile=True)
    with pytest.raises(ValueError, match="compile takes the loss as a function"):
        hessian(lambda: loss_fn(wanted, *batch), wanted, compile=True)
    with pytest.raises(ValueError, match="compile compiles one product, and has no whole"):
        hessian(loss_fn, params, batch, compile="whole")
    with pytest.raises(ValueError, match="compile goes without create_graph"):
        hessian(loss_fn, params, batch, compile=True, create_graph=True)
    with pytest.raises(ValueError, match="compile is for one batch"):
        hessian(loss_fn, params, [batch, batch], compile=True)
    with pytest.raises(ValueError, match="compile must be False, True"):
        hessian(loss_fn, params, batch, compile="step")
    H = hessian(loss_fn, params, batch, compile=EAGER)
    with pytest.raises(ValueError, match=r"products that are compiled run outside of torch\.func transforms"):
        torch.vmap(lambda v: H.products(v[None]))(torch.eye(20, dtype=torch.float64))


def test_a_loss_that_branches_on_numbers_is_not_compiled():
    loss_fn, params, batch = regression(lambda z: z.sin() if z.sum() > 0 else z.cos())
    with pytest.raises(ValueError, match=r"the product cannot be compiled: .* Leave compile out"):
        hessian(loss_fn, params, batch, compile=EAGER)
