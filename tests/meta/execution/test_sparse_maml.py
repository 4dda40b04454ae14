"""MAML with row-sparse embedding tables, adapted or shared by all tasks, against MAML with dense tables."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.sparse.tables.row_sparse import RowSparse
from metagrad.tasks import Batch, Examples
from tests.marks import covering, slow
from tests.meta.textbook import learner
from tests.sparse.guards import no_large_outputs

sgd = mg.optim.rules.sgd

V, D = 2000, 4
TASKS = 4


class Ratings(nn.Module):
    """A model with two tables of different widths. It uses the second table twice."""

    def __init__(self, num_rows=V, norm=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(num_rows, D)
        self.nested = nn.ModuleDict({"item": nn.Embedding(num_rows, 3, **options)})
        self.body = nn.Sequential(nn.Linear(D + 3, 6), norm or nn.Identity(), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, ids):
        item = self.nested["item"]
        return self.body(torch.cat([self.user(ids[..., 0]), item(ids[..., 1]) * item(ids[..., 2])], -1))


class BagModel(nn.Module):
    def __init__(self, num_rows=V, **options):
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.EmbeddingBag(num_rows, D, **options)
        self.body = nn.Linear(D, 1)

    def forward(self, ids):
        return self.body(torch.tanh(self.item(ids)))


class DenseBag(nn.EmbeddingBag):
    """A mean without ``padding_idx``, since ``nn.EmbeddingBag`` has no second derivative."""

    def forward(self, ids):
        return self.weight[ids].mean(1)


def plain(num_rows=V):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(num_rows, D), nn.Flatten(), nn.Linear(3 * D, 1))


BOTH = ["user.weight", "nested.item.weight"]
MODELS = {
    "two tables": (Ratings, BOTH),
    "one of two": (Ratings, ["nested.item.weight"]),
    "padding": (lambda: Ratings(padding_idx=7), BOTH),
    "padding, dense": (lambda: Ratings(padding_idx=7), ()),
    "sparse flag": (lambda: Ratings(sparse=True), BOTH),
    "known layers": (plain, ["0.weight"]),
    "bag": (BagModel, ["item.weight"]),
}


def draw(num_rows=V, dtype=torch.float64, tasks=TASKS):
    """Return a batch in which tasks, and their support and query examples, share some ids and the padding row."""
    generator = torch.Generator().manual_seed(1)

    def examples(count):
        ids = torch.randint(num_rows, (tasks, count, 3), generator=generator)
        ids[:, 0] = torch.tensor([5, 7, 9])
        ids[0] = ids[0, :1]  # this task uses fewer rows
        return Examples(ids, torch.randn(tasks, count, 1, generator=generator, dtype=dtype))

    return Batch(examples(4), examples(3))


def dense_twin(model):
    for module in model.modules():
        if isinstance(module, nn.EmbeddingBag):
            module.__class__ = DenseBag
        elif isinstance(module, nn.Embedding):
            module.sparse = False
    return model


def both(case, dtype=torch.float64, **options):
    """Return a MAML with row-sparse tables, and a MAML with dense tables in a Python loop."""
    make, sparse = MODELS[case]
    options = {"inner": sgd(lr=0.3), "steps": 3, **options}
    maml = mg.MAML(make().to(dtype), F.mse_loss, sparse=sparse, **options)
    options |= {"task_chunk": 1, "memory": "full"}
    return maml, mg.MAML(dense_twin(make().to(dtype)), F.mse_loss, **options)


def dense(tensor):
    return tensor.to_dense() if isinstance(tensor, RowSparse) else tensor


def gradients(loss, maml, **options):
    params = {name: p for name, p in maml.named_parameters() if p.requires_grad}
    return mg.grad(loss, params, materialize_grads=True, **options)


def assert_same(got, expected, rtol=1e-9, atol=1e-12):
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(dense(got[name]), expected[name], rtol=rtol, atol=atol, msg=name)


def assert_equal_to_dense(maml, reference, batch):
    out, expected = maml(batch), reference(batch)
    for name in ("loss", "support_losses", "query_losses", "query_outputs"):
        torch.testing.assert_close(getattr(out, name), getattr(expected, name), rtol=1e-10, atol=1e-12)
    grads = gradients(out.loss, maml)
    assert all(isinstance(grads[f"model.{name}"], RowSparse) for name in maml.sparse)
    assert_same(grads, gradients(expected.loss, reference))


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize(
    ("task_chunk", "memory"),
    [(None, "full"), (1, "step"), slow(3, "step")],
)
def test_equals_dense(case, task_chunk, memory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no fall-back to the loop
        assert_equal_to_dense(*both(case, task_chunk=task_chunk, memory=memory), draw())


def lr_by_parameter():
    """Return learning rates of Meta-SGD, with one for each column of the table."""
    values = {
        "0.weight": torch.linspace(0.1, 0.4, D),
        "2.weight": torch.tensor(0.2),
        "2.bias": torch.tensor(0.3),
    }
    return {name: nn.Parameter(value.double()) for name, value in values.items()}


RULES = {
    "weight decay": lambda: sgd(lr=0.3, weight_decay=0.1),
    "momentum": lambda: sgd(lr=0.2, momentum=0.9),
    "Nesterov and decay": lambda: sgd(lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
    "Adam and decay": lambda: mg.optim.rules.adam(lr=0.05, weight_decay=0.1),
    "a learned lr for each step": lambda: sgd(
        lr=nn.Parameter(torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64))
    ),
    "a learned lr for each parameter": lambda: sgd(lr=lr_by_parameter(), weight_decay=0.1),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("order", "task_chunk"), [(2, None), (1, 1)])
def test_rules(rule, order, task_chunk):
    make, sparse = MODELS["known layers"]
    options = {"steps": 3, "order": order, "task_chunk": task_chunk}
    maml, reference = (
        learner(mg.MAML, make().double(), inner=RULES[rule](), sparse=names, **options)
        for names in (sparse, ())
    )
    assert_equal_to_dense(maml, reference, draw())
    assert_adapted_equal_to_dense(maml, reference)  # knows rows that the support does not


def assert_adapted_equal_to_dense(maml, reference):
    batch = draw()
    results = []
    for each in (maml, reference):
        fast = each.adapt(batch.support)
        y = fast(batch.query.x)
        results.append((y, gradients((y**3).sum(), each)))
        with torch.no_grad():
            torch.testing.assert_close(each.adapt(batch.support)(batch.query.x), y.detach())
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-10, atol=1e-12)
    assert_same(results[0][1], results[1][1])


@pytest.mark.parametrize(
    ("ends", "task_chunk"),
    covering(
        [{"truncate": 2}, {"tolerance": 2.0}, {"truncate": 2, "tolerance": 2.0}],
        [None, 1, 3],
        fast=lambda ends, task_chunk: task_chunk != 3 or len(ends) == 2,
    ),
    ids=str,
)
def test_rows_that_the_support_does_not_know_end_with_their_task(ends, task_chunk):
    """Weight decay changes unused rows until their task stops. Only the last steps are differentiated."""
    inner = sgd(lr=0.3, momentum=0.5, weight_decay=0.2)
    maml, reference = both("known layers", inner=inner, steps=5, task_chunk=task_chunk, **ends)
    assert_adapted_equal_to_dense(maml, reference)
    if "tolerance" in ends:
        assert len(maml.adapt(draw().support).steps.unique()) > 1


def test_the_adapted_rows():
    maml, reference = both("known layers")
    support = draw().support
    fast, whole = maml.adapt(support), reference.adapt(support)
    rows, values = fast.rows["0.weight"], fast.params["0.weight"]
    assert rows.shape == values.shape[:2]
    for task in range(TASKS):
        expected = sorted(set(support.x[task].flatten().tolist()))
        assert rows[task, : len(expected)].tolist() == expected
        assert (rows[task, len(expected) :] == expected[-1]).all()
        adapted = values[task, : len(expected)]
        torch.testing.assert_close(adapted, whole.params["0.weight"][task, expected], rtol=1e-10, atol=1e-12)


def test_derivatives_up_to_the_third():
    def loss(table, weight):
        model = Table(table, weight)
        maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.3), steps=2, sparse=["table"])
        return maml(batch).loss

    batch = draw(num_rows=10, tasks=2)
    table = torch.randn(10, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 1, dtype=torch.float64, requires_grad=True)
    assert mg.gradcheck(loss, [table, weight], order=3, directions=1)


class Table(nn.Module):
    """A model whose parameters are computed from other tensors."""

    def __init__(self, table, weight):
        super().__init__()
        self._parameters["table"] = table * (1 + 0 * table.sum())
        self._parameters["weight"] = weight * 1

    def forward(self, ids):
        return torch.tanh(F.embedding(ids, self.table).flatten(-2) @ self.weight)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_arrive_as_rows_in_grad(accumulate):
    maml, reference = both("two tables")
    batch = draw()
    for _ in range(accumulate):
        maml(batch).loss.backward()
        reference(batch).loss.backward()
    for name in BOTH:
        got = maml.model.get_parameter(name).grad
        assert isinstance(got, RowSparse)
        torch.testing.assert_close(
            got.to_dense(), reference.model.get_parameter(name).grad, rtol=1e-9, atol=1e-12
        )
    ids = torch.cat([batch.support.x, batch.query.x], 1)
    assert maml.model.user.weight.grad.rows.tolist() == ids[..., 0].unique().tolist()


@pytest.mark.parametrize(
    ("memory", "task_chunk"), [slow("full", None), ("full", 1), ("step", None), slow("step", 1)]
)
def test_nothing_is_as_large_as_the_table(memory, task_chunk):
    num_rows = 20_000
    model = Ratings(num_rows)
    rule = sgd(lr=0.1, momentum=0.9, weight_decay=0.1)
    maml = mg.MAML(model, F.mse_loss, inner=rule, steps=3, memory=memory, task_chunk=task_chunk, sparse=BOTH)
    batch = draw(num_rows, torch.float32)
    with no_large_outputs(num_rows * 3 - 1):
        maml(batch).loss.backward()
        maml.adapt(batch.support)(batch.query.x).sum().backward()
    assert len(model.user.weight.grad.rows) < 100
    reference = mg.MAML(Ratings(num_rows), F.mse_loss, inner=rule, steps=1)
    with pytest.raises(AssertionError, match="allocates"), no_large_outputs(num_rows * 3 - 1):
        reference(batch).loss.backward()


@pytest.mark.parametrize(("sparse", "norm"), [(BOTH, None), ((), None), (BOTH, "running"), (BOTH, "support")])
def test_running_statistics_and_dropout_are_as_without_the_pass_that_finds_rows(sparse, norm):
    options = {"inner": sgd(lr=0.1), "steps": 2, "norm": norm, "task_chunk": None if norm else 1}
    torch.manual_seed(0)
    model = Ratings(norm=nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))).double()
    torch.manual_seed(5)
    out = mg.MAML(model, F.mse_loss, sparse=sparse, **options)(draw())
    whole = Ratings(norm=nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))).double()
    torch.manual_seed(5)
    expected = mg.MAML(whole, F.mse_loss, **options)(draw())
    torch.testing.assert_close(out.query_outputs, expected.query_outputs, rtol=1e-10, atol=1e-12)
    for (name, got), (_, wanted) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)


def test_tied_tables_go_by_either_name():
    results = []
    for sparse in ((), ["first.weight"], ["second.weight"]):
        model = Tied().double()
        maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.3), steps=2, sparse=sparse)
        results.append(gradients(maml(draw()).loss, maml))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.out = nn.Embedding(V, D), nn.Embedding(V, D), nn.Linear(D, 1)
        self.second.weight = self.first.weight

    def forward(self, ids):
        return self.out(self.first(ids[..., 0]) * self.second(ids[..., 1]))


# Tables that tasks share


ADAPTED = {"two tables": "body", "padding": "body", "bag": "body", "known layers": "2"}
FAST = {("two tables", None, "full"), ("two tables", 3, "step"), ("known layers", None, "full")}


@pytest.mark.parametrize(
    ("case", "task_chunk", "memory"),
    covering(ADAPTED, [None, 1, 3], ["full", "step"], fast=lambda *case: case in FAST),
)
def test_shared_tables_equal_dense_ones(case, task_chunk, memory):
    """The row-sparse meta-gradient of a shared table equals the dense one in every mode."""
    maml, reference = both(case, adapt=ADAPTED[case], task_chunk=task_chunk, memory=memory)
    assert maml.sparse == tuple(MODELS[case][1])
    assert_equal_to_dense(maml, reference, draw())


def test_one_table_is_shared_and_the_other_adapts():
    maml, reference = both("two tables", adapt=["nested", "body"])
    batch = draw()
    assert_equal_to_dense(maml, reference, batch)
    fast = maml.adapt(batch.support)
    assert list(fast.rows) == ["nested.item.weight"]
    expected = reference.adapt(batch.support)(batch.query.x)
    torch.testing.assert_close(fast(batch.query.x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "memory"),
    [("two tables", "full"), *itertools.product(["padding", "padding, dense"], ["step", "sqrt"])],
)
def test_a_gradient_of_the_gradient_is_that_of_whole_tables(case, memory):
    """Lookups of shared tables are repeated when a step is computed again."""
    batch, results = draw(), []
    for maml in both(case, adapt="body", memory=memory):
        first = gradients(maml(batch).loss, maml, create_graph=True)
        norm = sum((dense(g) ** 3).sum() for g in first.values())
        results.append([dense(g) for g in (*first.values(), *gradients(norm, maml).values())])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [mg.ANIL, mg.CAVIA])
def test_nothing_is_as_large_as_a_shared_table(algorithm):
    num_rows = 100_000

    class InContext(Ratings):
        def __init__(self):
            super().__init__(num_rows)
            self.context = nn.Parameter(torch.zeros(1))

        def forward(self, ids):
            return super().forward(ids) + self.context

    part = {"head": "body"} if algorithm is mg.ANIL else {}
    maml = algorithm(InContext(), F.mse_loss, inner=sgd(lr=0.1), steps=2, sparse=BOTH, **part)
    with no_large_outputs(num_rows * 3 - 1):
        maml(draw(num_rows, torch.float32)).loss.backward()
    assert isinstance(maml.model.user.weight.grad, RowSparse)


@pytest.mark.parametrize("order", [1, 2])
def test_a_lookup_in_the_forward_of_a_model_has_row_sparse_gradients_that_are_summed_over_stacked_tasks(
    order,
):
    class Lookup(nn.Embedding):
        def forward(self, ids):
            return mg.sparse.embedding(ids, self.weight)

    torch.manual_seed(0)
    model, reference = (
        nn.Sequential(kind(20, 3), nn.Tanh(), nn.Linear(3, 1)).double() for kind in (Lookup, nn.Embedding)
    )
    reference.load_state_dict(model.state_dict())
    tasks = (torch.randint(20, (3, 5)), torch.randn(3, 5, 1).double())
    for learned in (model, reference):
        mg.MAML(learned, F.mse_loss, inner=sgd(lr=0.1), steps=2, order=order)((tasks, tasks)).loss.backward()
    torch.testing.assert_close(dense(model[0].weight.grad), reference[0].weight.grad)
    assert isinstance(model[0].weight.grad, RowSparse)
