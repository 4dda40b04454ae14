"""The Hessian against closed forms and dense oracles, on models, tables, batches, in every mode."""

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
from metagrad.memory.storages import StorageCounter, StorageMode
from metagrad.sparse import Pattern, SparseTensor


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
def test_models_against_the_dense_hessian(make):
    torch.manual_seed(0)
    model, x = make()
    model, y = model.double(), torch.tensor([0, 1, 1, 0, 1])[: len(x)]
    params = {k: p.detach() for k, p in model.named_parameters()}
    loss_fn = with_params(model, F.cross_entropy)
    expected = dense(loss_fn, params, x, y)
    with hessian(loss_fn, params, (x, y)) as H:
        close(H.to_dense(), expected)
        vectors = draw(2, H.shape[0])
        close(H.multiply(vectors), vectors @ expected, 1e-9)
        name = list(params)[2]
        part = H.space.slices[name]
        block = H[name]
        assert block.shape == (params[name].numel(),) * 2
        vectors = draw(2, block.shape[0])
        close(block.multiply(vectors), vectors @ expected[part, part], 1e-6)
        layer = H[name.rpartition(".")[0]]
        assert layer.space.names == [n for n in params if n.startswith(name.rpartition(".")[0] + ".")]


def test_sparse_tensors():
    pattern = Pattern(torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2]), (3, 3))
    a, b, x = SparseTensor(pattern, draw(3)), draw(3), draw(3)

    def of_values(values, b):
        return (SparseTensor(pattern, values) @ x + b).sin().sum()

    expected = dense(lambda p: of_values(p["a"], p["b"]), {"a": a.values, "b": b})
    with hessian(lambda p: of_values(p["a"].values, p["b"]), {"a": a, "b": b}) as H:
        close(H.to_dense(), expected, 1e-8)
        found = H @ {"a": a, "b": b}
        assert found["a"].pattern is pattern
        close(found["a"].values, (expected @ torch.cat([a.values, b]))[:3], 1e-8)


def test_what_torch_lacks_is_named():
    w = draw(3).requires_grad_()
    with pytest.raises(MissingDerivative, match="HardsigmoidBackward0"):
        hessian(F.hardsigmoid(w).sum(), {"w": w})


# Third derivatives


def test_products_can_be_differentiated():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.GroupNorm(1, 2)).double(), draw(4, 3)
    loss = with_params(model, lambda z, y: (z - y).square().sum())
    names = [n for n, _ in model.named_parameters()]

    def products(params, v, y):
        params = dict(zip(names, params, strict=True))
        with hessian(loss, params, (x, y), create_graph=True) as H:
            return H @ v, H.gradient, H.loss

    params = [(p.detach() + 0.1).requires_grad_() for p in model.parameters()]
    v = draw(sum(p.numel() for p in params)).requires_grad_()
    results = products(params, v, draw(4, 2))
    assert all(result.requires_grad for result in results)
    assert mg.gradcheck(products, (params, v, draw(4, 2).requires_grad_()), order=1, directions=1)


# Life and errors


def test_the_graph_is_freed_after_an_exception():
    w = torch.randn(100, requires_grad=True)
    gc.disable()
    try:
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            with pytest.raises(KeyError), hessian(w.sin().exp().sum(), {"w": w}, create_graph=True) as H:  # noqa: PT012
                assert counter.total > 1500
                H @ torch.ones(100)
                raise KeyError
            assert counter.total == H.loss.nbytes + H.gradient.nbytes
        with pytest.raises(ValueError, match="H is closed"):
            H["w"] @ torch.ones(100)
    finally:
        gc.enable()


def test_checkpointed_modules():
    torch.manual_seed(0)
    model, x = mlp()
    model, y = model.double(), draw(5, 2)
    params = dict(model.named_parameters())
    expected = dense(with_params(model, squares), params, x, y)
    vectors = draw(6, expected.shape[0])
    with hessian(squares(mg.checkpoint(model, x), y), params) as H:
        close(H.multiply(vectors), vectors @ expected)


def test_norms_with_wrong_third_derivatives_are_refused():
    w = draw(3, 4).requires_grad_()
    with pytest.raises(MissingDerivative, match="layer_norm"):
        hessian(F.layer_norm(w, (4,)).exp().sum(), {"w": w}, create_graph=True)


def test_without_grad_nothing_is_on_the_tape():
    w = draw(3).requires_grad_()
    with hessian(lambda p: p["w"].exp().sum(), {"w": w}, create_graph=True) as H:
        with torch.no_grad():
            assert not (H @ draw(3)).requires_grad
        assert (H @ draw(3)).requires_grad


def test_dropout_is_one_mask_for_all_products():
    x, w = draw(4, 3), draw(3)
    with hessian(lambda p, x: F.dropout(x * p["w"], 0.5).sin().sum(), {"w": w}, (x,)) as H:
        close(H.to_dense(), H.to_dense())


TABLE = draw(5, 2).requires_grad_()


def test_unused_parameters_and_row_sparse_gradients_are_named():
    with pytest.raises(ValueError, match=r"does not depend on params\['v'\]"):
        hessian(lambda params: params["w"].sin().sum(), {"w": draw(3), "v": draw(3)})
    loss = F.embedding(torch.tensor([1]), TABLE, sparse=True).exp().sum()
    with pytest.raises(ValueError, match=r"the gradient of params\['t'\] is row-sparse"):
        hessian(loss, {"t": TABLE})


def test_mixed_derivatives():
    w, o = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with mg.hessian((o * w**2).sum(), {"w": w}) as H:
        torch.testing.assert_close(H.mixed(torch.ones(2), [o])[0], torch.tensor(4.0))
