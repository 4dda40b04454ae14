"""Accumulation over batches: exact, one graph at a time, and checked for what moves between passes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metagrad as mg
from metagrad.curvature.operators.batches import is_one_batch
from metagrad.curvature.operators.ggn import fisher, ggn
from metagrad.curvature.operators.hessian import hessian
from metagrad.memory.storages import StorageCounter, StorageMode
from metagrad.tasks.batch import Examples
from tests.distributed.threads import in_threads
from tests.draws import randn


def made(num_data=7):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, dict(model.named_parameters()), randn(num_data, 3), torch.randint(3, (num_data,))


def cut(x, y, *sizes):
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def hessian_of(model, loss_fn, params, data, **how):
    def loss(params, x, y):
        return loss_fn(torch.func.functional_call(model, params, (x,)), y)

    return hessian(loss, params, data, **how)


def empirical(*args, **how):
    return fisher(*args, kind="empirical", **how)


OPERATORS = [ggn, fisher, empirical, hessian_of]


def test_unequal_batches_are_exact():
    for make in OPERATORS:
        for reduction in ["mean", "sum"]:
            model, params, x, y = made()
            loss_fn = nn.CrossEntropyLoss(reduction=reduction)
            with (
                make(model, loss_fn, params, (x, y)) as whole,
                make(model, loss_fn, params, cut(x, y, 4, 1, 2), reduction=reduction) as parts,
            ):
                torch.testing.assert_close(parts.to_dense(), whole.to_dense())
                loss, gradient, _ = parts.probe()
                torch.testing.assert_close(loss, whole.loss.reshape(()))
                torch.testing.assert_close(gradient, whole.gradient)
                torch.testing.assert_close(parts["2.weight"].to_dense(), whole["2.weight"].to_dense())
                v = {name: torch.ones_like(p) for name, p in params.items()}
                torch.testing.assert_close(parts @ v, whole @ v)
                null = torch.linalg.eigh(whole.to_dense())[1].mT[:2]  # images of ggn are only rounding errors
                torch.testing.assert_close(parts.multiply(null), whole.multiply(null))


def test_known_losses_say_themselves_what_their_mean_is_over():
    for make in OPERATORS:
        for loss_fn in [
            nn.CrossEntropyLoss(ignore_index=1),
            nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.1),
            nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]).double(), reduction="sum"),
        ]:
            model, params, x, y = made(12)
            with (
                make(model, loss_fn, params, (x, y)) as whole,
                make(model, loss_fn, params, cut(x, y, 5, 7)) as parts,
            ):
                torch.testing.assert_close(parts.to_dense(), whole.to_dense())
                torch.testing.assert_close(parts.probe()[1], whole.gradient)


def test_a_batch_of_ignored_labels_counts_for_nothing():
    for make in OPERATORS:
        model, params, x, y = made(12)
        y[:5] = -100
        with (
            make(model, nn.CrossEntropyLoss(), params, (x, y)) as whole,
            make(model, nn.CrossEntropyLoss(), params, cut(x, y, 5, 7)) as parts,
        ):
            torch.testing.assert_close(parts.to_dense(), whole.to_dense())
            torch.testing.assert_close(parts.probe()[1], whole.gradient)
        y[:] = -100
        with pytest.raises(ValueError, match="no batch has data that count"):
            make(model, nn.CrossEntropyLoss(), params, cut(x, y, 5, 7)).to_dense()


def test_weighted_squares():
    model, params, x, _ = made(6)
    y, weight = randn(6, 3), torch.rand(6, 3).double()
    loss_fn = lambda z, y: F.mse_loss(z, y[..., 0], weight=y[..., 1])  # noqa: E731
    y = torch.stack([y, weight], -1)
    with ggn(model, loss_fn, params, (x, y)) as whole, ggn(model, loss_fn, params, cut(x, y, 2, 4)) as parts:
        torch.testing.assert_close(parts.to_dense(), whole.to_dense())


def test_terms_may_be_counted_by_a_function():
    for make in [ggn, hessian_of]:
        model, params, x, y = made()

        def loss_fn(z, y):  # mean over tokens that are not padding
            return (F.cross_entropy(z, y, reduction="none") * (y != 1)).sum() / (y != 1).sum()

        count = lambda batch: int((batch[1] != 1).sum())  # noqa: E731
        with (
            make(model, loss_fn, params, (x, y)) as whole,
            make(model, loss_fn, params, cut(x, y, 3, 4), reduction=count) as parts,
        ):
            torch.testing.assert_close(parts.to_dense(), whole.to_dense())


def test_one_graph_is_held_at_a_time():
    model, params, x, y = made(64)
    few, many = cut(x, y, 32, 32), [(x[:32], y[:32])] * 20
    peaks = []
    for batches in (few, many):
        G = ggn(model, F.cross_entropy, params, batches)
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            product = G @ torch.ones(31).double()
        peaks.append(counter.peak)
        assert (
            counter.total <= 3 * product.nbytes + 64
        )  # the product, and a pair to compare the next one with
        counter.close()
    assert peaks[1] <= peaks[0] + 1024


def test_products_can_be_differentiated():
    model, params, x, y = made()
    v, found = torch.ones(31).double(), []
    for data in ((x, y), cut(x, y, 4, 3)):
        with ggn(model, F.cross_entropy, params, data, create_graph=True) as G:
            found.append(torch.autograd.grad((G @ v).pow(3).sum(), list(params.values())))
    torch.testing.assert_close(*found)


def test_dropout_is_named():
    for make in [ggn, hessian_of]:
        model, params, x, y = made()
        model = nn.Sequential(*model, nn.Dropout(0.5))
        params = dict(model.named_parameters())
        named = r"Look for 3 \(Dropout\) in training mode" if make is ggn else "Look for dropout"
        with pytest.raises(ValueError, match=rf"the loss by .*the gradient by .*the product by .*{named}"):
            make(model, F.cross_entropy, params, cut(x, y, 4, 3))
        model.eval()
        make(model, F.cross_entropy, params, cut(x, y, 4, 3))


def test_attention_dropout_is_named():
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.3, batch_first=True)
    model = nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Flatten())
    data = [(torch.randn(5, 4), torch.randint(4, (5,)))]
    torch.manual_seed(0)
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        pytest.raises(ValueError, match=r"1.self_attn \(MultiheadAttention\)"),
    ):
        ggn(model, F.cross_entropy, dict(model.named_parameters()), data)


def test_batch_norm_and_a_shuffling_loader_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    x, y = torch.randn(20, 3), torch.randint(3, (20,))
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
    params = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) in training mode, a DataLoader that shuffles"):
        ggn(model, F.cross_entropy, params, loader)
    model.eval()
    ggn(model, F.cross_entropy, params, loader)  # only the order of the sum changes


def test_only_what_moved_is_named():
    class Moving:
        """A loss that is a constant apart, another one each time."""

        def __init__(self):
            self.calls = 0

        def __call__(self, z, y):
            self.calls += 1
            return F.cross_entropy(z, y) + self.calls

    model, params, x, y = made()
    with pytest.raises(ValueError, match=r"differ, relatively: the loss by \d\.\de-\d\d\. Look for") as error:
        ggn(model, Moving(), params, cut(x, y, 4, 3), reduction="mean")
    assert "gradient" not in str(error.value).partition("Look for")[0].partition("differ")[2]


def test_nan_is_not_deterministic_but_named():
    model, params, x, y = made()
    x[0] = torch.nan
    with pytest.raises(ValueError, match=r"the product has nan or inf in the entry of '0\.weight'"):
        ggn(model, F.cross_entropy, params, cut(x, y, 4, 3))


def test_data_and_reductions_that_are_refused():
    model, params, x, y = made()
    data = cut(x, y, 4, 3)
    with pytest.raises(ValueError, match="no batch has data that count"):
        ggn(model, F.cross_entropy, params, [])
    with pytest.raises(ValueError, match="must be said whether it is the mean"):
        ggn(model, lambda z, y: z.square().mean(), params, data)
    with pytest.raises(ValueError, match="reduction='mean', but the loss is a sum"):
        ggn(model, nn.CrossEntropyLoss(reduction="sum"), params, data, reduction="mean")
    with pytest.raises(ValueError, match=r'reduction: expected "mean", "sum" or a function .* got \'all\''):
        ggn(model, F.cross_entropy, params, data, reduction="all")
    with pytest.raises(ValueError, match="does not begin with a tensor whose first dimension counts"):
        hessian(lambda p, n: (p["w"] ** n).sum(), {"w": torch.ones(2)}, [(2.0,)])


DATA = [
    (True, torch.ones(2)),
    (True, (torch.ones(2), torch.ones(2))),
    (True, [torch.ones(2), torch.ones(2)]),
    (True, Examples(torch.ones(2), torch.ones(2))),
    (True, {"x": torch.ones(2)}),
    (False, [(torch.ones(2), torch.ones(2))]),
    (False, [[torch.ones(2), torch.ones(2)]]),
    (False, []),
    (False, iter([])),
]


def test_one_batch_is_told_from_several():
    for one, data in DATA:
        assert is_one_batch(data) is one


@pytest.mark.parametrize("moves", ["gradient", "product"])
def test_the_gradient_and_the_product_are_looked_at(moves):
    model, params, x, y = made()
    passes = []

    def loss_fn(z, y):  # from the second pass on, the value is equal and the gradient or curvature is not
        passes.append(1)
        extra = (z - z.detach()) if moves == "gradient" else (z - z.detach()).square()
        return F.cross_entropy(z, y) + len(passes) // 2 * extra.sum()

    with pytest.raises(ValueError, match=rf"the {moves} by"):
        hessian_of(model, loss_fn, params, cut(x, y, 4, 3))


def setting():
    """Return data, and a model for each of two processes and one of all data."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4)).double()
    return torch.randn(6, 3).double(), torch.randint(0, 4, (6,)), [copy.deepcopy(net) for _ in range(3)]


def operator(kind, net, x, y):
    params = dict(net.named_parameters())
    return (
        mg.ggn(net, F.cross_entropy, params, (x, y))
        if kind == "ggn"
        else mg.hessian(F.cross_entropy(net(x), y), params)
    )


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_products_and_estimates_are_those_of_all_data(kind):
    x, y, nets = setting()

    def results(H):
        generator = torch.Generator().manual_seed(0)
        return (
            H.to_dense(),
            H.trace(method="hutchinson", probes=8, generator=generator).value,
            H["0"].to_dense(),
        )

    def process(group):
        share = slice(3) if group.rank() else slice(3, 6)
        return results(mg.curvature.Averaged(operator(kind, nets[group.rank()], x[share], y[share]), group))

    expected = results(operator(kind, nets[2], x, y))
    for found in in_threads(2, process):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_vectors_that_differ_between_processes_are_refused():
    x, y, nets = setting()

    def process(group):
        H = mg.curvature.Averaged(operator("ggn", nets[group.rank()], x, y), group)
        H @ torch.full((H.shape[0],), 1.0 + group.rank()).double()

    with pytest.raises(ValueError, match=r"vectors, for which estimators .*: expected the same"):
        in_threads(2, process)
