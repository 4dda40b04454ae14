"""Fisher matrices: exact ones against expectations, sampled ones against exact, empirical ones against gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.curvature.operators.ggn import fisher, ggn
from tests.draws import randn

torch.manual_seed(0)


def made(num_classes=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_classes)).double()
    return model, dict(model.named_parameters()), randn(6, 3), torch.randint(num_classes, (6,))


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def gradients(model, loss_of, x, y):
    """Return the gradient of each datum."""
    return torch.stack(
        [
            flat(torch.autograd.grad(loss_of(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())))
            for i in range(len(x))
        ]
    )


def test_the_exact_one_is_the_expectation_over_classes():
    model, params, x, y = made()
    expected = torch.zeros(31, 31, dtype=torch.float64)
    for label in range(3):
        p = model(x).softmax(1)[:, label].detach()
        g = gradients(model, F.cross_entropy, x, torch.full((6,), label))
        expected += (p[:, None] * g).t() @ g / 6
    with (
        fisher(model, F.cross_entropy, params, (x, y)) as K,
        ggn(model, F.cross_entropy, params, (x, y)) as G,
    ):
        torch.testing.assert_close(K.to_dense(), expected)
        torch.testing.assert_close(G.to_dense(), expected)


def test_of_probabilities_it_is_not_the_gauss_newton_matrix():
    x, y = randn(6, 2), torch.rand(6).double().round()

    def model(params, x):
        return (x @ params["w"]).sigmoid()

    params = {"w": randn(2)}
    p = model(params, x)
    with fisher(model, F.binary_cross_entropy, params, (x, y)) as K:
        torch.testing.assert_close(K.to_dense(), x.t() @ torch.diag(p * (1 - p)) @ x / 6)
    with ggn(model, F.binary_cross_entropy, params, (x, y)) as G:
        assert not torch.allclose(G.to_dense(), x.t() @ torch.diag(p * (1 - p)) @ x / 6)


def test_it_does_not_depend_on_where_the_model_ends():
    model, params, x, y = made()
    cold = lambda z, y: F.cross_entropy(3 * z.tanh(), y)  # noqa: E731
    with (
        fisher(model, cold, params, (x, y)) as K,
        ggn(
            lambda p, x: 3 * torch.func.functional_call(model, p, (x,)).tanh(),
            F.cross_entropy,
            params,
            (x, y),
        ) as G,
    ):
        torch.testing.assert_close(K.to_dense(), G.to_dense())


LOSSES = [
    (F.cross_entropy, torch.randint(3, (6,))),
    (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]).double(), reduction="sum"),
        torch.randint(3, (6,)),
    ),
    (nn.CrossEntropyLoss(ignore_index=1), torch.tensor([0, 1, 2, 1, 0, 2])),
    (F.mse_loss, randn(6, 3)),
    (F.binary_cross_entropy_with_logits, torch.rand(6, 3).double().round()),
    (lambda z, y: F.gaussian_nll_loss(z, y, 0.3), randn(6, 3)),
    (lambda z, y: F.binary_cross_entropy(z.sigmoid(), y), torch.rand(6, 3).double().round()),
]


@pytest.mark.parametrize(("loss_fn", "y"), LOSSES)
def test_sampled_ones_converge_to_the_exact_one(loss_fn, y):
    model, params, x, _ = made()
    v = randn(31)
    torch.manual_seed(0)
    with fisher(model, loss_fn, params, (x, y)) as K:
        exact = v @ (K @ v)
    draws = torch.stack([v @ (fisher(model, loss_fn, params, (x, y), kind="sampled") @ v) for _ in range(49)])
    assert (draws.mean() - exact).abs() < 4 * draws.std() / 7
    many = fisher(model, loss_fn, params, (x, y), kind="sampled", samples=100)
    assert (v @ (many @ v) - exact).abs() < 4 * draws.std() / 10
    assert draws.std() > 0


def seeded(seed, *args, **options):
    torch.manual_seed(seed)
    return fisher(*args, kind="sampled", **options).to_dense()


def test_a_sampled_one_is_a_fixed_symmetric_matrix_of_the_seed():
    model, params, x, y = made()
    for data in ((x, y), [(x[:2], y[:2]), (x[2:], y[2:])]):
        found = [seeded(seed, model, F.cross_entropy, params, data, samples=2) for seed in (0, 0, 1)]
        assert torch.equal(found[0], found[1])
        assert not torch.allclose(found[0], found[2])
        torch.testing.assert_close(found[0], found[0].t())


def test_batches_have_labels_of_their_own():
    model, params, x, y = made()
    half = (x[:3], y[:3])
    twice, once = (seeded(0, model, F.cross_entropy, params, data) for data in ([half, half], half))
    assert not torch.allclose(twice, once)


def test_the_empirical_one_is_made_of_gradients():
    for reduction in ["mean", "sum"]:
        model, params, x, y = made()
        g = gradients(model, F.cross_entropy, x, y)
        with fisher(model, nn.CrossEntropyLoss(reduction=reduction), params, (x, y), kind="empirical") as E:
            torch.testing.assert_close(E.to_dense(), g.t() @ g / (6 if reduction == "mean" else 1))


def test_the_empirical_one_of_squares():
    model, params, x, _ = made()
    y = randn(6, 3)
    g = gradients(model, lambda z, y: F.mse_loss(z, y, reduction="sum"), x, y)
    with fisher(model, F.mse_loss, params, (x, y), kind="empirical") as E:
        torch.testing.assert_close(E.to_dense(), g.t() @ g / 18)


def test_a_weight_counts_as_so_many_data():
    model, params, x, y = made()
    weight = torch.tensor([1.0, 2.0, 0.0]).double()
    loss_fn = nn.CrossEntropyLoss(weight)
    repeated = torch.cat([torch.arange(6)[y == 0], torch.arange(6)[y == 1].repeat(2)])
    assert len(repeated) > 0
    for kind in ("exact", "empirical"):
        with (
            fisher(model, loss_fn, params, (x, y), kind=kind) as weighted,
            fisher(model, F.cross_entropy, params, (x[repeated], y[repeated]), kind=kind) as plain,
        ):
            torch.testing.assert_close(weighted.to_dense(), plain.to_dense())


def test_data_of_several_positions_are_added_before_the_outer_product():
    model = nn.Conv1d(2, 3, 2).double()
    params, x, y = dict(model.named_parameters()), randn(4, 2, 5), torch.randint(3, (4, 4))
    g = gradients(model, lambda z, y: F.cross_entropy(z, y, reduction="sum"), x, y)
    with fisher(model, F.cross_entropy, params, (x, y), kind="empirical") as E:
        torch.testing.assert_close(E.to_dense(), g.t() @ g / 16)
    of_positions = torch.stack(
        [
            flat(torch.autograd.grad(F.cross_entropy(model(x)[i, :, j], y[i, j]), list(model.parameters())))
            for i in range(4)
            for j in range(4)
        ]
    )
    by_position = lambda z, y: F.cross_entropy(z.transpose(1, 2).reshape(-1, 3), y.flatten())  # noqa: E731
    with fisher(model, by_position, params, (x, y), kind="empirical") as E:
        torch.testing.assert_close(E.to_dense(), of_positions.t() @ of_positions / 16)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_empirical_one_of_any_loss(reduction):
    model, params, x, _ = made()
    y = randn(6, 3)

    def loss_fn(z, y):
        per_datum = (z - y).cosh().log().sum(1)
        return per_datum.mean() if reduction == "mean" else per_datum.sum()

    g = gradients(model, lambda z, y: (z - y).cosh().log().sum(), x, y)
    expected = g.t() @ g / (6 if reduction == "mean" else 1)
    with fisher(model, loss_fn, params, (x, y), kind="empirical", reduction=reduction) as E:
        torch.testing.assert_close(E.to_dense(), expected)
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    with fisher(model, loss_fn, params, batches, kind="empirical", reduction=reduction) as E:
        torch.testing.assert_close(E.to_dense(), expected)


def test_batch_norm_in_training_couples_data_and_is_no_hindrance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    x, y = randn(6, 3), torch.randint(3, (6,))
    terms = F.cross_entropy(model(x), y, reduction="none")
    g = torch.stack(
        [flat(torch.autograd.grad(t, list(model.parameters()), retain_graph=True)) for t in terms]
    )
    with fisher(model, F.cross_entropy, dict(model.named_parameters()), (x, y), kind="empirical") as E:
        torch.testing.assert_close(E.to_dense(), g.t() @ g / 6)


def test_outputs_that_are_refused():
    model, params, x, y = made()
    with pytest.raises(ValueError, match="the output of the model has nan"):
        fisher(model, F.cross_entropy, params, (x * torch.nan, y), kind="sampled")
    weight = {"0.weight": params["0.weight"]}
    two = lambda p, x: (x @ p["0.weight"].t(), p["0.weight"].sum())  # noqa: E731
    loss_fn = lambda z, y: z[0].exp().mean() * z[1]  # noqa: E731
    with pytest.raises(ValueError, match="first dimensions of the outputs: expected the number of data"):
        fisher(two, loss_fn, weight, (x, y), kind="empirical", reduction="mean")
