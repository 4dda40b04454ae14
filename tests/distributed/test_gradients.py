"""Averaged gradients equal the gradients of the whole batch. The ranks are threads."""

import copy

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.distributed import average_gradients
from tests.distributed.threads import in_threads

SIZES = [1, 2, 3]
ROWS, WIDTH = 40, 3


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def regression():
    return mg.models.MLP([2, 8, 1]).double()


def learner(model):
    rule = mg.optim.rules.sgd(lr=torch.nn.Parameter(torch.tensor(0.1, dtype=torch.float64)))
    return mg.MAML(model, F.mse_loss, inner=rule, steps=2)


class Scores(torch.nn.Module):
    """Embedding table of items, and a linear head."""

    def __init__(self, sparse=False):
        super().__init__()
        self.item = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)
        self.head = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)

    def forward(self, ids):
        return self.head(self.item(ids)).squeeze(-1)


def tasks_of(count, x, y):
    half = x.shape[1] // 2
    pair = [mg.tasks.Examples(x[:, part], y[:, part]) for part in (slice(half), slice(half, None))]
    return mg.tasks.Batch(*pair)


def gradients(module):
    return {name: p.grad.to_dense() if p.grad is not None else None for name, p in module.named_parameters()}


def averaged(make, batch, size, **options):
    """Return the gradients of the whole batch, and the gradients and traffic of each rank."""
    whole = make()

    def process(group):
        share = batch.shard(group)
        own = copy.deepcopy(whole)
        own(share).loss.backward()
        traffic = average_gradients(own, weight=share.num_tasks, group=group, **options)
        return gradients(own), traffic, {name: p.grad for name, p in own.named_parameters()}

    found = in_threads(size, process)
    whole(batch).loss.backward()
    return gradients(whole), found


@pytest.mark.parametrize("bucket", ["25MiB", 100])
@pytest.mark.parametrize("size", SIZES)
def test_the_meta_gradient_of_five_tasks_with_a_learned_rate(size, bucket):
    batch = tasks_of(5, torch.randn(5, 8, 2).double(), torch.randn(5, 8, 1).double())
    expected, found = averaged(lambda: learner(regression()), batch, size, bucket=bucket)
    assert "inner_lr" in expected
    for gradient, traffic, _ in found:
        for name, value in gradient.items():
            close(value, expected[name])
            assert torch.equal(value, found[0][0][name])  # bitwise identical on all ranks
        if size > 1:
            flags = 1 + 4 * len(expected)
            assert traffic.reduced == 8 * (sum(value.numel() for value in expected.values()) + flags)
            assert traffic.sent == 2 * traffic.reduced * (size - 1) // size
        else:
            assert traffic.sent == 0


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("adapts", [True, False])
def test_the_meta_gradient_of_a_table_is_sent_by_its_rows(size, adapts):
    ids = torch.randint(0, ROWS, (5, 6))
    batch = tasks_of(5, ids, torch.randn(5, 6).double())

    def make():
        adapt = None if adapts else "head"
        return mg.MAML(
            Scores(),
            F.mse_loss,
            inner=mg.optim.rules.sgd(lr=0.1),
            steps=2,
            sparse=["item.weight"],
            adapt=adapt,
        )

    expected, found = averaged(make, batch, size)
    most = max(len(ids[mg.tasks.batch.share_of(5, rank, size)].unique()) for rank in range(size))
    for gradient, traffic, raw in found:
        for name, value in gradient.items():
            close(value, expected[name])
            assert torch.equal(value, found[0][0][name])
        table = raw["model.item.weight"]
        assert isinstance(table, mg.sparse.RowSparse)
        assert torch.equal(table.rows, ids.unique())
        if size > 1:
            assert traffic.gathered == most * (4 + 8 * WIDTH) + 16


@pytest.mark.parametrize("size", SIZES)
def test_sparse_gradients_of_torch_stay_sparse(size):
    ids, y = torch.randint(0, ROWS, (6, 4)), torch.randn(6, 4).double()
    whole = Scores(sparse=True)
    F.mse_loss(whole(ids), y).backward()

    def process(group):
        own = copy.deepcopy(whole)
        own.zero_grad()
        part = slice(group.rank() * 6 // size, (group.rank() + 1) * 6 // size)
        F.mse_loss(own(ids[part]), y[part]).backward()
        average_gradients(own, weight=len(ids[part]), group=group)
        return own

    for own in in_threads(size, process):
        assert own.item.weight.grad.layout is torch.sparse_coo
        close(own.item.weight.grad.to_dense(), whole.item.weight.grad.to_dense())
        close(own.head.weight.grad, whole.head.weight.grad)


def test_rows_of_a_stack_of_tables_and_of_several_dtypes():
    stack, half = torch.zeros(2, 5, 3).double(), torch.zeros(4, 2).bfloat16()

    def process(group):
        a, b = stack.clone().requires_grad_(), half.clone().requires_grad_()
        rows = torch.tensor([group.rank(), 5, 9])
        values = torch.full((3, 3), 1.0 + group.rank()).double()
        a.grad = mg.sparse.RowSparse(rows, values, (2, 5, 3)) if group.rank() < 2 else None
        b.grad = torch.ones_like(b)
        average_gradients({"a": a, "b": b, "again": a}, group=group)
        return a.grad, b.grad

    for a, b in in_threads(3, process):
        assert a.rows.tolist() == [0, 1, 5, 9]
        close(a.values[:, 0] * 3, torch.tensor([1.0, 2.0, 3.0, 3.0]).double())
        assert torch.equal(b, torch.ones_like(b))


def test_the_gradient_of_a_channels_last_parameter_has_its_layout():
    model = torch.nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last)
    x = torch.randn(4, 2, 5, 5).double()
    expected = torch.autograd.grad(model(x).square().mean(), model.weight)[0]

    def process(group):
        own = copy.deepcopy(model)
        own(x[group.rank() :: 2]).square().mean().backward()
        average_gradients(own, group=group)
        return own.weight.grad

    for gradient in in_threads(2, process):
        assert gradient.stride() == model.weight.stride()
        close(gradient, expected)


def test_gradients_that_some_processes_do_not_have():
    def process(group):
        first, second, third = (torch.zeros(2).double().requires_grad_() for _ in range(3))
        if group.rank():
            first.grad = torch.ones(2).double() * group.rank()
        third.grad = torch.full((2,), float("nan" if group.rank() == 2 else 1)).double()
        weight = 0 if group.rank() == 2 else 2  # the last rank had no task that counts
        average_gradients([first, second, third], weight=weight, group=group)
        return first.grad, second.grad, third.grad

    for first, second, third in in_threads(3, process):
        close(first, torch.full((2,), 0.5).double())
        assert second is None
        close(third, torch.ones(2).double())


def test_without_a_group_nothing_changes():
    model = regression()
    model(torch.ones(1, 2).double()).sum().backward()
    before = gradients(model)
    assert average_gradients(model, weight=3) == mg.distributed.Traffic(1)
    assert all(torch.equal(value, before[name]) for name, value in gradients(model).items())


def with_gradient(gradient, layout=torch.strided):
    param = torch.ones(2, 2).to_sparse(layout=layout) if layout is not torch.strided else torch.ones(2, 2)
    param.requires_grad_()
    param.grad = gradient
    return {"table": param}


def on_tape():
    x = torch.ones(2, 2, requires_grad=True)
    return x * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: with_gradient(on_tape()), "the gradient of table has a graph .*leave out what"),
        (
            lambda rank: with_gradient(torch.ones(2, 2).to_sparse_csr(), torch.sparse_csr),
            "is neither strided, RowSparse nor sparse COO",
        ),
        (
            lambda rank: with_gradient(torch.ones(2, 2) if rank else torch.ones(2, 2).to_sparse(1)),
            "the gradient of table is strided in 1 and sparse COO in 1 processes",
        ),
        (lambda rank: with_gradient(torch.ones(2, 2).to_sparse(1 + rank)), "the gradient of table has rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_gradients_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        in_threads(2, lambda group: average_gradients(make(group.rank()), group=group))


@pytest.mark.parametrize("weight", [-1, float("nan")])
def test_weights_that_are_none(weight):
    with pytest.raises(ValueError, match="weight: expected a number of 0 or more"):
        average_gradients(regression(), weight=weight)


def test_weights_that_are_all_zero():
    with pytest.raises(ValueError, match="weight is 0 in every process"):
        in_threads(2, lambda group: average_gradients(regression(), weight=0, group=group))


def test_a_gradient_that_is_refused_is_refused_in_all_processes():
    def process(group):
        param = torch.zeros(2, requires_grad=True)
        param.grad = torch.ones(2)
        if group.rank():
            param.grad.device_mesh = "as a DTensor has"
        with pytest.raises(ValueError, match="is a DTensor"):
            average_gradients([param], group=group)
        return param.grad.tolist()

    assert in_threads(2, process) == [[1.0, 1.0]] * 2
