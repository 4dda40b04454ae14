"""Gauss-Newton operators against closed forms and dense Jacobians and Hessians of torch.func."""

import functools
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import metagrad as mg
from metagrad.curvature.operators.ggn import ggn
from metagrad.memory.storages import StorageCounter, StorageMode
from metagrad.sparse import Pattern, SparseTensor, spmm
from tests.draws import randn

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        with sdpa_kernel(SDPBackend.MATH):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x).transpose(1, 2)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), randn(5, 3), torch.randint(3, (5,))


def cnn():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )
    return model, randn(4, 1, 6, 6), torch.randint(3, (4,))


def sequence():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.GELU(), nn.Conv1d(3, 4, 1))  # [N, C, d1]
    return model, randn(3, 2, 6), torch.randint(4, (3, 4))


def attention():
    return Attention(), randn(2, 3, 4), torch.randint(3, (2, 3))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def lstm():
    return Recurrent(nn.LSTM), randn(4, 3, 3), torch.randint(3, (4,))


def gru():
    return Recurrent(nn.GRU), randn(4, 3, 3), torch.randint(3, (4,))


def norms():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.GroupNorm(2, 4), nn.Linear(4, 3))
    return model, randn(5, 3), torch.randint(3, (5,))


PROBLEMS = [mlp, cnn, sequence, attention, lstm, gru, norms]


def made(problem):
    torch.manual_seed(0)
    model, x, y = problem()
    return model.double(), dict(model.named_parameters()), x, y


def parts_of(vector, params):
    split = vector.split([p.numel() for p in params.values()])
    return {k: part.view(p.shape) for (k, p), part in zip(params.items(), split, strict=True)}


def flat(params):
    return torch.cat([p.detach().flatten() for p in params.values()])


def dense_ggn(model, loss_fn, params, x, y):
    """J^T H J, by torch.func, every factor dense."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def outputs(vector):
        fresh = {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(model, {**parts_of(vector, params), **fresh}, (x,))

    point = flat(params)
    z = outputs(point).detach()
    # Row by row: the Jacobian of BatchNorm's in-place update of its statistics cannot be vmapped.
    jacobian = torch.stack(
        [
            torch.func.vjp(outputs, point)[1](row)[0]
            for row in torch.eye(z.numel()).double().view(-1, *z.shape)
        ]
    )
    hessian = torch.func.jacrev(torch.func.jacrev(lambda z: loss_fn(z, y)))(z)
    return jacobian.t() @ hessian.reshape(z.numel(), z.numel()) @ jacobian


@pytest.mark.parametrize("problem", PROBLEMS)
def test_products_are_those_of_the_dense_matrix(problem):
    model, params, x, y = made(problem)
    before = {name: b.clone() for name, b in model.named_buffers()}
    expected = dense_ggn(model, F.cross_entropy, params, x, y)
    with ggn(model, F.cross_entropy, params, (x, y)) as G:
        torch.testing.assert_close(G.to_dense(), expected, rtol=1e-9, atol=1e-12)
        v = torch.linspace(-1, 1, G.shape[0], dtype=torch.float64)
        as_dict = G @ parts_of(v, params)
        torch.testing.assert_close(flat(as_dict), expected @ v, rtol=1e-9, atol=1e-12)
        gradient = torch.autograd.grad(F.cross_entropy(_called(model, x), y), list(params.values()))
        torch.testing.assert_close(G.gradient, torch.cat([g.flatten() for g in gradient]))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def _called(model, x):
    return torch.func.functional_call(model, {name: b.clone() for name, b in model.named_buffers()}, (x,))


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (F.mse_loss, randn(5, 3)),
        (nn.BCEWithLogitsLoss(reduction="sum"), torch.rand(5, 3).double()),
        (lambda z, y: 0.5 * (z - y).square().mean(), randn(5, 3)),  # by autodiff
        (lambda z, y: (z - y).cosh().log().sum(), randn(5, 3)),
        (functools.partial(F.huber_loss, delta=0.3), randn(5, 3)),
        (lambda z, y: F.cross_entropy(z.view(-1, 3), y.flatten()), torch.randint(3, (5,))),
        (lambda z, y: F.cross_entropy(z / 2, y), torch.randint(3, (5,))),
        (lambda z, y: F.cross_entropy(z, y)[None], torch.randint(3, (5,))),
    ],
)
def test_losses(loss_fn, target):
    model, params, x, _ = made(mlp)
    expected = dense_ggn(model, lambda z, y: loss_fn(z, y).reshape(()), params, x, target)
    with ggn(model, loss_fn, params, (x, target)) as G:
        torch.testing.assert_close(G.to_dense(), expected, rtol=1e-9, atol=1e-12)


def test_linear_regression():
    x, y = randn(7, 3), randn(7, 1)
    model = nn.Linear(3, 1, bias=False).double()
    with ggn(model, F.mse_loss, dict(model.named_parameters()), (x, y)) as G:
        torch.testing.assert_close(G.to_dense(), 2 / 7 * x.t() @ x)


def test_log_probabilities_have_the_matrix_of_logits():
    model, params, x, y = made(mlp)
    normalised = nn.Sequential(*model, nn.LogSoftmax(-1))
    with (
        ggn(model, F.cross_entropy, params, (x, y)) as G,
        ggn(normalised, F.nll_loss, dict(normalised.named_parameters()), (x, y)) as K,
    ):
        torch.testing.assert_close(K.to_dense(), G.to_dense())


def test_trees_of_outputs():
    x, y = randn(5, 2), randn(5, 2)

    def model(params, x):
        return {"mean": x @ params["a"], "log": (x * params["b"]).tanh(), "ids": torch.arange(5)}

    def loss_fn(out, y):
        return F.gaussian_nll_loss(out["mean"], y, out["log"].exp()) + out["log"].square().sum()

    params = {"a": randn(2, 2), "b": randn(2)}

    def outputs(vector):
        parts = parts_of(vector, params)
        return torch.stack([x @ parts["a"], (x * parts["b"]).tanh()])

    jacobian = torch.func.jacrev(outputs)(flat(params)).reshape(20, 6)
    z = outputs(flat(params))
    inner = torch.func.jacrev(torch.func.jacrev(lambda z: loss_fn({"mean": z[0], "log": z[1]}, y)))(z)
    expected = jacobian.t() @ inner.reshape(20, 20) @ jacobian
    with ggn(model, loss_fn, params, (x, y)) as G:
        torch.testing.assert_close(G.to_dense(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("norm", "loss_fn"),
    [
        (nn.GroupNorm(1, 4), F.cross_entropy),
        (nn.GroupNorm(1, 4), lambda z, y: (z.exp() * y[:, None]).mean()),  # by autodiff
        *((norm, F.cross_entropy) for norm in (nn.LayerNorm(4), nn.BatchNorm1d(4), nn.InstanceNorm1d(5))),
    ],
)
def test_products_can_be_differentiated(norm, loss_fn):
    """Norm layers are included, although torch gets their third derivatives wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 3)).double()
    names, x, y = list(dict(model.named_parameters())), randn(5, 3), torch.randint(3, (5,))

    def product(v, *params):
        with ggn(model, loss_fn, dict(zip(names, params, strict=True)), (x, y), create_graph=True) as G:
            return G @ v

    params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    v = randn(sum(p.numel() for p in params)).requires_grad_()
    assert mg.gradcheck(product, (v, *params), order=1, directions=2)


def test_checkpointed_modules_recompute_with_the_parameters_they_have():
    model, params, x, y = made(mlp)
    wrapped = nn.Sequential(Checkpointed(*model))
    with (
        ggn(model, F.cross_entropy, params, (x, y)) as G,
        ggn(wrapped, F.cross_entropy, dict(wrapped.named_parameters()), (x, y)) as K,
    ):
        torch.testing.assert_close(K.to_dense(), G.to_dense())


def test_other_values_than_the_models_own():
    model, params, x, y = made(mlp)
    moved = {name: p.detach() * 0.5 + 0.1 for name, p in params.items()}
    with ggn(model, F.cross_entropy, moved, (x, y)) as G:
        assert not any(p.requires_grad for p in moved.values())
        torch.testing.assert_close(G.to_dense(), dense_ggn(model, F.cross_entropy, moved, x, y))
    assert all(model.get_parameter(name) is p for name, p in params.items())


def test_chunks_change_nothing():
    for chunk in [1, "1KiB", "64MiB"]:
        model, params, x, y = made(mlp)
        with ggn(model, F.cross_entropy, params, (x, y), chunk=chunk) as G:
            expected = dense_ggn(model, F.cross_entropy, params, x, y)
            torch.testing.assert_close(G.to_dense(), expected, rtol=1e-9, atol=1e-12)


def test_sparse_matrices_have_their_values_for_coordinates():
    pattern = Pattern(torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]), (3, 4))
    params = {"a": SparseTensor(pattern, randn(3))}
    x, y = randn(4, 2), randn(3, 2)
    with ggn(lambda p, x: spmm(p["a"], x), F.mse_loss, params, (x, y)) as G:
        # One output each: 2 / 6 times the squares of the rows of x that they multiply.
        torch.testing.assert_close(G.to_dense(), torch.diag(x[[2, 0, 1]].square().sum(1) / 3))
        assert isinstance((G @ params)["a"], SparseTensor)


def test_nothing_is_left_when_it_is_closed():
    model, params, x, y = made(mlp)
    with StorageMode(counter := StorageCounter(torch.device("cpu"))):
        with ggn(model, F.cross_entropy, params, (x, y)) as G:
            G @ torch.ones(G.shape[0], dtype=torch.float64)
            assert counter.total > 0
        evaluated = counter.total
    assert evaluated <= G.loss.nbytes + 16
    counter.close()
    with pytest.raises(ValueError, match="closed"):
        G @ torch.ones(G.shape[0], dtype=torch.float64)
    with pytest.raises(ValueError, match="closed"):
        G["0"] @ torch.ones(16, dtype=torch.float64)


def test_a_loss_beside_the_output_has_no_part_in_the_matrix():
    params = {"a": torch.ones(2)}
    seen = {}

    def model(params, x):
        seen.update(params)
        return x * params["a"]

    with pytest.raises(ValueError, match="does not depend on what the model returns"):
        ggn(model, lambda z, y: seen["a"].square().sum(), params, (torch.ones(2), torch.zeros(2)))


def test_autocast_is_as_it_was():
    model, x, y = mlp()
    params, x = dict(model.named_parameters()), x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        operators = [ggn(model, F.cross_entropy, params, data) for data in ((x, y), [(x, y)])]
    found = [G.to_dense() for G in operators]
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(*found)


class Weighted(nn.Linear):
    def forward(self, x, weight):
        return super().forward(x) * weight


class WeightedContainer(nn.Linear):
    def forward(self, batch):
        x, weight = batch.values() if isinstance(batch, dict) else batch
        return super().forward(x) * weight


@pytest.mark.parametrize("model", [Weighted(3, 4), WeightedContainer(3, 4)])
@pytest.mark.parametrize("kind", [dict, UserDict, lambda x: tuple(x.values()), lambda x: list(x.values())])
def test_a_container_holds_the_arguments_of_a_module_or_is_its_argument(model, kind):
    model, params = model.double(), dict(model.named_parameters())
    x, y = {"x": randn(5, 3), "weight": randn(5, 1)}, torch.randint(4, (5,))
    expected = ggn(
        lambda p, x: F.linear(x["x"], p["weight"], p["bias"]) * x["weight"], F.cross_entropy, params, (x, y)
    )
    matrices = [make(model, F.cross_entropy, params, (kind(x), y)) for make in (mg.ggn, mg.fisher)]
    several = mg.ggn(model, F.cross_entropy, params, [(kind(x), y)])
    for matrix in (*matrices, several):
        torch.testing.assert_close(matrix.to_dense(), expected.to_dense())
