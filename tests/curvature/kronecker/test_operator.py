"""K-FAC as an operator: exact where theory says so, and closed forms against dense matrices."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import metagrad as mg
from metagrad.curvature import Kronecker, kfac
from tests.curvature.maps import drawn
from tests.curvature.operators.test_fisher import gradients

F64 = torch.float64


def made(*layers):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(layer() for layer in layers)).double()
    return model.eval(), dict(model.named_parameters())


def ggn(model, loss_fn, params, data):
    with mg.ggn(model, loss_fn, params, data) as G:
        return G.to_dense()


def error(got, expected):
    return float((got - expected).norm() / expected.norm())


def block_diagonal(matrix, operator, *groups):
    kept = torch.zeros_like(matrix)
    for names in groups:
        places = torch.cat([torch.arange(operator.space.size)[operator.space.slices[name]] for name in names])
        kept[places[:, None], places] = matrix[places[:, None], places]
    return kept


class Mean(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.mean(self.dims)


def summed(output, target):
    return F.mse_loss(output, target, reduction="sum")


def test_the_full_block_of_a_norm_is_the_same_with_corrected_eigenvalues():
    """A second pass without layers adds nothing."""
    model, params = made(lambda: nn.LayerNorm(3))
    data = drawn(8, 3), drawn(8, 3, seed=2)
    plain, corrected = (
        kfac(model, F.mse_loss, params, data, fisher="exact", correct=c).to_dense() for c in (False, True)
    )
    assert error(corrected, plain) < 1e-14


def test_blocks_of_a_deep_linear_network_are_exact():
    model, params = made(*(lambda i=i, o=o: nn.Linear(i, o) for i, o in ((4, 6), (6, 5), (5, 3))))
    data = drawn(20, 4), drawn(20, 3, seed=2)
    K = kfac(model, F.mse_loss, params, data, fisher="exact")
    dense = ggn(model, F.mse_loss, params, data)
    expected = block_diagonal(dense, K, *([f"{i}.weight", f"{i}.bias"] for i in range(3)))
    assert error(K.to_dense(), expected) < 1e-13


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: nn.Conv1d(2, 3, 3, padding=1), (7,)),
        (lambda: nn.Conv2d(2, 3, 3, stride=2), (6, 5)),
        (lambda: nn.Conv3d(2, 3, (1, 2, 2)), (2, 3, 3)),
    ],
)
def test_reduce_is_exact_behind_an_average_over_positions(make, size):
    model, params = made(make, lambda: Mean(*range(2, 2 + len(size))))
    data = drawn(8, 2, *size), drawn(8, 3, seed=2)
    dense = ggn(model, F.mse_loss, params, data)
    K, expanded = (
        kfac(model, F.mse_loss, params, data, fisher="exact", sharing=s) for s in ("reduce", "expand")
    )
    assert error(K.to_dense(), dense) < 1e-14
    assert error(expanded.to_dense(), dense) > 0.1


@pytest.mark.parametrize("flat", [True, False])
def test_expand_is_exact_where_every_position_is_a_term(flat):
    model, params = made(lambda: nn.Linear(4, 3), *[lambda: nn.Flatten(0, 1)] * flat)
    y = drawn(6, 5, 3, seed=2)
    data = drawn(6, 5, 4), y.flatten(0, 1) if flat else y
    K = kfac(model, F.mse_loss, params, data, fisher="exact")
    assert error(K.to_dense(), ggn(model, F.mse_loss, params, data)) < 1e-14


def test_a_table_of_one_lookup_is_exact_and_its_padding_has_no_block():
    model, params = made(lambda: nn.Embedding(6, 3, padding_idx=2))
    data = torch.tensor([0, 1, 5, 5, 2, 3]), drawn(6, 3)
    K = kfac(model, F.mse_loss, params, data, fisher="exact")
    assert error(K.to_dense(), ggn(model, F.mse_loss, params, data)) < 1e-14


class Twice(nn.Module):
    """Layers that are called twice, that share a weight, and behind a bag of embeddings."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, ids):
        x = self.norm(self.table(ids).sum(1))
        return self.head(self.second(self.first(torch.tanh(self.first(x)))).relu_())


def twice():
    torch.manual_seed(0)
    model = Twice().double()
    ids = torch.randint(7, (12, 5))
    return model, dict(model.named_parameters()), (ids, torch.randint(3, (12,)))


def convolutions():
    model, params = made(
        lambda: nn.Conv2d(2, 4, 3), lambda: nn.BatchNorm2d(4), lambda: nn.Conv2d(4, 3, 3, bias=False),
        lambda: nn.GroupNorm(1, 3), nn.Tanh, nn.Flatten, lambda: nn.Linear(27, 3),
    )  # fmt: skip
    return model, params, (drawn(6, 2, 7, 7), torch.arange(6) % 3)


@pytest.mark.parametrize("network", [convolutions, twice])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_the_corrected_trace_is_the_trace_of_the_fisher_matrix(network, fisher):
    model, params, data = network()
    K = kfac(model, F.cross_entropy, params, data, correct=True, fisher=fisher)
    with mg.fisher(model, F.cross_entropy, params, data, kind=fisher) as dense:
        expected = dense.to_dense().trace()
    assert abs(float(K.trace()) / float(expected) - 1) < 1e-12
    for name in params:
        if name.startswith(("norm", "1.", "3.")):
            with mg.fisher(model, F.cross_entropy, {name: params[name]}, data, kind=fisher) as block:
                torch.testing.assert_close(K[name].to_dense(), block.to_dense(), rtol=1e-11, atol=1e-15)


def test_corrected_eigenvalues_are_the_diagonal_in_the_basis():
    model, params = made(lambda: nn.Linear(4, 5), nn.Tanh, lambda: nn.Linear(5, 3))
    data = drawn(11, 4), torch.arange(11) % 3
    K = kfac(model, F.cross_entropy, params, data, correct=True, fisher="exact")
    dense = ggn(model, F.cross_entropy, params, data)
    values, vectors = torch.linalg.eigh(K.to_dense())
    torch.testing.assert_close((vectors.T @ dense @ vectors).diagonal(), values, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("fisher", ["exact", "empirical", "sampled"])
def test_batches_equal_the_whole(correct, fisher):
    model, params, (x, y) = twice()
    options = {"correct": correct, "fisher": fisher}
    parts = [(x[:5], y[:5]), (x[5:], y[5:])]
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
    for loss_fn in (
        lambda z, y: F.cross_entropy(z, y, weight=weights),
        lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    ):
        whole, batched = (
            kfac(model, loss_fn, params, data, generator=torch.Generator().manual_seed(0), **options)
            for data in ((x, y), parts)
        )
        if fisher == "sampled":  # labels are drawn in another order
            assert error(batched.to_dense(), whole.to_dense()) < 1.0
        else:
            assert error(batched.to_dense(), whole.to_dense()) < 1e-13


def test_sampled_labels_average_to_the_exact_matrix():
    model, params, data = twice()
    exact = kfac(model, F.cross_entropy, params, data, fisher="exact")

    def drawn(samples):
        source = torch.Generator().manual_seed(0)
        return kfac(model, F.cross_entropy, params, data, samples=samples, generator=source).to_dense()

    assert error(drawn(200), exact.to_dense()) < 0.2
    assert torch.equal(drawn(5), drawn(5))


@pytest.mark.parametrize("correct", [False, True])
def test_closed_forms_are_those_of_the_dense_matrix(correct):
    model, params, data = twice()
    K = kfac(model, F.cross_entropy, params, data, correct=correct, fisher="exact")
    dense, eye, v = K.to_dense(), torch.eye(K.shape[0], dtype=F64), drawn(2, K.shape[0])
    damping = torch.tensor(0.01, dtype=F64, requires_grad=True)
    expected = torch.linalg.solve(dense + damping.detach() * eye, v.T).T
    torch.testing.assert_close(K.solve(v, damping=0.01).value, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(K.inverse(damping)(v).detach(), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(K.inverse(0.01)(v[0]), expected[0], rtol=1e-10, atol=1e-12)
    named = K.solve(K.space.unflatten(v[0]), damping=0.01).value
    torch.testing.assert_close(K.space.flatten(named), expected[0], rtol=1e-10, atol=1e-12)
    root = K.root(0.01)
    torch.testing.assert_close(root(root(v)), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(K.root(0.01, power=1.0)(v), v @ dense + 0.01 * v, rtol=1e-10, atol=1e-12)
    value = K.log_determinant(damping=damping).value
    torch.testing.assert_close(value.detach(), torch.logdet(dense + 0.01 * eye), rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(value, damping)
    torch.testing.assert_close(slope, torch.linalg.inv(dense + 0.01 * eye).trace(), rtol=1e-10, atol=0)
    assert abs(float(K.trace()) / float(dense.trace()) - 1) < 1e-13
    values = torch.linalg.eigvalsh(dense).flip(0)[:4]
    torch.testing.assert_close(K.eigenvalues(4).values, values, rtol=1e-7, atol=0)
    stored = io.BytesIO()
    torch.save(K.state_dict(), stored)
    loaded = Kronecker.from_state_dict(params, torch.load(io.BytesIO(stored.getvalue())))
    assert torch.equal(loaded @ v.T, K @ v.T)


@pytest.mark.parametrize("eigen", [False, True])
@pytest.mark.parametrize("network", ["linear", "convolutions"])
def test_a_step_of_the_optimizer_is_the_solve_of_the_operator(eigen, network):
    if network == "linear":
        model, params = made(
            lambda: nn.Linear(6, 5),
            nn.Tanh,
            lambda: nn.Linear(5, 4, bias=False),
            nn.Tanh,
            lambda: nn.Linear(4, 3),
        )
        data = drawn(12, 6), torch.arange(12) % 3
    else:
        model, params = made(
            lambda: nn.Conv2d(2, 3, 3),
            lambda: nn.ReLU(inplace=True),
            lambda: nn.Conv2d(3, 4, 3, stride=2),
            nn.Flatten,
            lambda: nn.Linear(16, 3),
        )
        data = drawn(12, 2, 7, 7), torch.arange(12) % 3
    K = kfac(model, F.cross_entropy, params, data, correct=eigen, fisher="empirical")
    opt = mg.optim.KFAC(model, lr=1.0, momentum=0.0, damping=0.1, kl_clip=None, eigen=eigen)
    before = {name: p.detach().clone() for name, p in params.items()}
    F.cross_entropy(model(data[0]), data[1]).backward()
    expected = K.solve({name: p.grad for name, p in params.items()}, damping=0.1, split=not eigen).value
    opt.step()
    moved = {name: before[name] - p.detach() for name, p in params.items()}
    assert error(K.space.flatten(moved), K.space.flatten(expected)) < 1e-14


def test_ignored_positions_do_not_count_as_inputs():
    model, params = made(lambda: nn.Linear(4, 3))
    x, y = drawn(6, 5, 4), torch.arange(30).reshape(6, 5) % 3
    ignored = torch.arange(5) > torch.arange(6)[:, None]

    def loss_fn(z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    padded = kfac(model, loss_fn, params, (x, y.masked_fill(ignored, -100)), fisher="exact")
    kept = kfac(model, F.cross_entropy, params, (x[~ignored], y[~ignored]), fisher="exact")
    assert error(padded.to_dense(), kept.to_dense()) < 1e-13


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.tensor(1.5, dtype=F64)), nn.Linear(3, 2, dtype=F64)

    def forward(self, x):
        return self.inner(x) * self.scale


def test_other_parameters_have_the_block_that_is_chosen():
    torch.manual_seed(0)
    model = Scaled()
    params, data = dict(model.named_parameters()), (drawn(7, 3), torch.arange(7) % 2)
    with pytest.raises(ValueError, match=r"without other=\"diagonal\" or \"identity\": .*'scale'"):
        kfac(model, F.cross_entropy, params, data)
    expected = gradients(model, F.cross_entropy, *data)[:, 0].square().mean()
    K = kfac(model, F.cross_entropy, params, data, fisher="empirical", other="diagonal")
    torch.testing.assert_close(K["scale"].to_dense()[0, 0], expected, rtol=1e-12, atol=0)
    K = kfac(model, F.cross_entropy, params, data, other="identity")
    assert float(K["scale"].to_dense()) == pytest.approx(1.0, rel=1e-12)


def test_biases_and_weights_can_be_left_out():
    model, params = made(lambda: nn.Linear(4, 3), nn.Tanh, lambda: nn.Linear(3, 2))
    data = drawn(9, 4), drawn(9, 2)
    chosen = {name: params[name] for name in ("0.weight", "2.bias")}
    K = kfac(model, F.mse_loss, chosen, data, fisher="exact", correct=True, other="diagonal")
    dense = ggn(model, F.mse_loss, chosen, data)
    assert error(K["2.bias"].to_dense(), dense[12:, 12:].diag().diag()) < 1e-13
    assert abs(float(K.trace()) / float(dense.trace()) - 1) < 1e-13


class Tied(nn.Module):
    def __init__(self, by_call):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.by_call = by_call
        if by_call:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x) if self.by_call else F.linear(x, self.table.weight)


def test_what_is_not_known_is_an_error():
    data = torch.arange(5), torch.arange(5)
    tied, hidden = Tied(True).double(), Tied(False).double()
    with pytest.raises(ValueError, match=r"Embedding or norms, got \['table.weight'\]"):
        kfac(tied, F.cross_entropy, dict(tied.named_parameters()), data)
    with pytest.raises(ValueError, match=r"'table.weight' is not the sum .* used outside of its layer"):
        kfac(hidden, F.cross_entropy, {"table.weight": hidden.table.weight}, data)
    model, params = made(lambda: nn.Linear(3, 3), lambda: nn.BatchNorm1d(3))
    data = drawn(6, 3), torch.arange(6) % 3
    with pytest.raises(ValueError, match=r"'1' normalizes by the batch: .*model.eval\(\)"):
        kfac(model.train(), F.cross_entropy, params, data)
    model.eval()
    with pytest.raises(ValueError, match=r"fisher: expected one of 'exact', 'sampled', 'empirical'"):
        kfac(model, F.cross_entropy, params, data, fisher="true")
    zero = kfac(model, F.cross_entropy, params, (0 * data[0], data[1]), fisher="exact")
    for call in (zero.inverse, zero.root, zero.log_determinant, lambda: zero.solve(drawn(18))):
        with pytest.raises(ValueError, match=r"block of .* is singular: damping: expected above 0, got 0"):
            call()
    with pytest.raises(ValueError, match="damping: expected a number of 0 or more"):
        zero.solve(drawn(18), damping=-1.0)
    with pytest.raises(ValueError, match="expected parameters with the sizes"):
        Kronecker.from_state_dict({"0.weight": params["0.weight"]}, zero.state_dict())
    with pytest.raises(ValueError, match=r"expected \[18\]"):
        zero.solve(drawn(3), damping=1.0)


def pruned():
    layer = prune.random_unstructured(nn.Linear(3, 3), "weight", 0.5)
    return prune.random_unstructured(layer, "bias", 0.5)


def scaled():
    layer = nn.Linear(3, 3, bias=False)
    layer.register_parameter("scale", nn.Parameter(torch.rand(3)))
    layer.register_forward_hook(lambda module, args, output: output * module.scale)
    return layer


def patched():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
    return layer


@pytest.mark.parametrize("layer", [pruned, scaled, patched])
def test_a_linear_layer_that_computes_something_else_is_refused(layer):
    """Each had factors of a plain layer, and a trace that was off by 30 to 200 %."""
    model, params = made(layer, nn.Tanh)
    model(drawn(6, 3))  # a pruned weight is computed by a call
    with pytest.raises(ValueError, match=r"weight_orig|weight', '0.scale'|another forward"):
        kfac(model, F.cross_entropy, params, (drawn(6, 3), torch.arange(6) % 3), fisher="exact")


def test_data_that_have_no_matrix_are_an_error_with_the_reason():
    model, params = made(lambda: nn.Linear(3, 3))
    x, y, weight = drawn(6, 3), torch.arange(6) % 3, torch.tensor([-1.0, 1.0, 1.0], dtype=F64)
    calls = {
        "no batch has data that count": (F.cross_entropy, (x, torch.full_like(y, -100))),
        "no batch has data": (F.cross_entropy, (x[:0], y[:0])),
        "'0.weight': expected finite inputs": (F.cross_entropy, (x / 0, y)),
        "weights of the loss: expected numbers of 0 or more": (nn.CrossEntropyLoss(weight), (x, y)),
    }
    for message, (loss_fn, data) in calls.items():
        with pytest.raises(ValueError, match=message):
            kfac(model, loss_fn, params, data, fisher="exact")
    whole, parts = (
        kfac(model, F.cross_entropy, params, data, fisher="exact").to_dense()
        for data in ((x, y), [(x, y), (x[:0], y[:0])])
    )
    torch.testing.assert_close(whole, parts)
    random, own = made(lambda: nn.Linear(3, 3), lambda: nn.Dropout(0.5), lambda: nn.LayerNorm(3))
    with pytest.raises(RuntimeError, match=r"draws random numbers, as dropout does, call model.eval\(\)"):
        kfac(random.train(), F.cross_entropy, own, (x, y))


def test_single_precision_is_accurate():
    """The factors are decomposed in float64. In float32 the condition would lose all digits of the inverse."""
    model, params = made(lambda: nn.Linear(30, 8))
    data = drawn(200, 30) * torch.logspace(0, -3, 30), torch.arange(200) % 8
    exact = kfac(model, F.cross_entropy, params, data, fisher="exact")
    half = {name: p.detach().float() for name, p in params.items()}
    K = kfac(model.float(), F.cross_entropy, half, (data[0].float(), data[1]), fisher="exact")
    assert K.dtype == torch.float32
    v = drawn(K.shape[0])
    assert error(K.solve(v.float(), damping=1e-4).value.double(), exact.solve(v, damping=1e-4).value) < 1e-3
    assert math.isfinite(float(K.log_determinant(damping=1e-4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = kfac(model, F.cross_entropy, half, (data[0].float(), data[1]), fisher="exact", correct=True)
    assert {block.eigenvalues.dtype for block in cast.blocks} == {torch.float32}
    assert abs(float(cast.trace()) / float(exact.trace()) - 1) < 0.01


class Sequences(nn.Module):
    """A network on positions, which are transposed or looked up in a table without the examples."""

    def __init__(self, kind, positions):
        super().__init__()
        self.kind, self.table = kind, nn.Embedding(positions, 3)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        places = torch.arange(self.table.num_embeddings)
        x = x + self.table(places if self.kind == "table" else places.expand(len(x), -1))
        hidden = torch.tanh(self.first(x.transpose(0, 1) if self.kind == "transposed" else x))
        if self.kind == "flat":  # causal sums of positions, which come first among the rows
            hidden = hidden.transpose(0, 1).cumsum(0).flatten(0, 1)
            return self.last(hidden).unflatten(0, (-1, len(x))).transpose(0, 1)
        return self.last(hidden.mean(0 if self.kind == "transposed" else 1))


def test_rows_of_positions_before_examples_are_an_error():
    model, params = made(lambda: Sequences("flat", 3))

    def loss_fn(output, y):
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    with pytest.raises(ValueError, match=r"the input of '0.last.weight' must be the 5 examples"):
        kfac(model, loss_fn, params, (drawn(5, 3, 3), torch.arange(15).reshape(5, 3) % 2), correct=True)


@pytest.mark.parametrize("positions", [3, 5, 6])
@pytest.mark.parametrize("kind", ["table", "transposed", "right"])
def test_examples_that_do_not_come_first_are_an_error(kind, positions):
    model, params = made(lambda: Sequences(kind, positions))
    x, y = drawn(5, positions, 3), torch.tensor([0, 1, 1, 0, 1])
    if kind != "right":
        name = "table" if kind == "table" else "first"
        with pytest.raises(ValueError, match=rf"the input of '0.{name}.weight' must be the 5 examples, got"):
            kfac(model, F.cross_entropy, params, (x, y), correct=True)
        return
    K = kfac(model, F.cross_entropy, params, (x, y), correct=True, fisher="exact")
    torch.testing.assert_close(K.trace().value, ggn(model, F.cross_entropy, params, (x, y)).trace().detach())


def test_weights_of_outputs_and_hooks_of_users_keep_one_layer_exact():
    model, params = made(lambda: nn.Linear(3, 4, bias=False))
    nn.init.zeros_(params["0.weight"])
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    weight = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=F64)
    batch = drawn(2, 3), torch.zeros(2, 4, dtype=F64)

    def loss_fn(output, y):
        return F.binary_cross_entropy_with_logits(output, y, weight=weight)

    K = kfac(model, loss_fn, params, batch, fisher="exact")
    torch.testing.assert_close(K.to_dense(), ggn(model, loss_fn, params, batch))


def test_a_changed_input_and_tables_of_unequal_padding_are_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Embedding(3, 2, padding_idx=0), nn.Embedding(3, 2)
            self.layer, self.second.weight = nn.Linear(2, 2), self.first.weight

        def forward(self, x):
            hidden = (self.first(x) + self.second(x)).detach()
            output = self.layer(hidden)
            hidden.zero_()
            return output

    model, batch = Model(), (torch.tensor([0, 1]), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="in place"):
        kfac(model, F.mse_loss, dict(model.layer.named_parameters(prefix="layer")), batch)
    with pytest.raises(ValueError, match="first"):
        kfac(model, F.mse_loss, {"first.weight": model.first.weight}, batch)
