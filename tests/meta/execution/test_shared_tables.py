"""Embedding tables that tasks share: their row-sparse meta-gradients equal dense ones."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.marks import covering
from tests.meta.execution.test_sparse_maml import (
    BOTH,
    MODELS,
    Ratings,
    assert_equal_to_dense,
    both,
    dense,
    draw,
    gradients,
)
from tests.sparse.guards import no_large_outputs

sgd = mg.optim.rules.sgd

ADAPTED = {"two tables": "body", "padding": "body", "bag": "body", "known layers": "2"}
FAST = {("two tables", None, "full"), ("two tables", 3, "step"), ("known layers", None, "full")}


@pytest.mark.parametrize(
    ("case", "task_chunk", "memory"),
    covering(ADAPTED, [None, 1, 3], ["full", "step"], fast=lambda *case: case in FAST),
)
def test_equals_dense(case, task_chunk, memory):
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
@pytest.mark.parametrize("learner", [mg.ANIL, mg.CAVIA])
def test_nothing_is_as_large_as_the_table(learner):
    num_rows = 100_000

    class InContext(Ratings):
        def __init__(self):
            super().__init__(num_rows)
            self.context = nn.Parameter(torch.zeros(1))

        def forward(self, ids):
            return super().forward(ids) + self.context

    part = {"head": "body"} if learner is mg.ANIL else {}
    maml = learner(InContext(), F.mse_loss, inner=sgd(lr=0.1), steps=2, sparse=BOTH, **part)
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
