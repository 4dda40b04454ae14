from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import metagrad as mg
from metagrad.optim.rules import (
    TapeCurvature,
    adadelta,
    adagrad,
    adahessian,
    adam,
    adamw,
    adan,
    lion,
    rmsprop,
    rowwise,
    sgd,
    sophia_h,
)
from metagrad.sparse.tables.embedding import embedding
from metagrad.sparse.tables.row_sparse import RowSparse
from metagrad.sparse.tables.row_table import RowTable
from tests.marks import slow
from tests.sparse.guards import no_large_outputs

V, D = 9, 3
STILL = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "nesterov": sgd(0.1, momentum=0.9, nesterov=True),
    "dampening": sgd(0.1, momentum=0.9, dampening=0.3),
    "maximize": sgd(0.1, maximize=True),
    "adam": adam(0.1),
    "amsgrad": adam(0.1, amsgrad=True, maximize=True),
    "adadelta": adadelta(1.0, eps=1e-2),
    "lion": lion(0.1),
    "adan": adan(0.1),
    "adagrad": adagrad(0.1),
    "adagrad, options": adagrad(0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "rmsprop": rmsprop(0.01),
    "rmsprop, options": rmsprop(0.01, momentum=0.5, centered=True),
    "per column": sgd({"table": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)}, momentum=0.5),
    "per step": adam([0.1, 0.2, 0.3, 0.4]),
}
DECAYING = {
    "sgd": sgd(0.1, weight_decay=0.1),
    "nesterov": sgd(0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": adamw(0.1, weight_decay=0.1),
    "lion": lion(0.1, weight_decay=0.1),
    "adan": adan(0.1, weight_decay=0.1),
    "per column": sgd(0.1, weight_decay={"table": torch.tensor([0.1, 0.0, 0.3], dtype=torch.float64)}),
}
RULES = {**{f"still: {k}": r for k, r in STILL.items()}, **{f"decaying: {k}": r for k, r in DECAYING.items()}}
over_rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
BATCHES = [torch.tensor(ids) for ids in ([0, 4, 4], [4, 5], [1, 0, 1], [7])]


def table(dtype=torch.float64):
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


def run(rule, lookup, weight, batches=BATCHES, memory="full"):
    def step(state, t):
        params, rule_state = state
        loss = (lookup(batches[t], params["table"]).tanh() ** 2).sum()
        return rule.update(mg.grad(loss, params, create_graph=True), rule_state, params), loss

    params = {"table": weight}
    (params, state), _ = mg.unroll(step, (params, rule.init(params)), steps=len(batches), memory=memory)
    return params["table"], state


def meta_loss(lookup, adapted):
    every = torch.arange(V).view(3, 3)
    return (lookup(every, adapted) ** 3).sum() + (lookup(BATCHES[0], adapted) ** 2).sum()


@settings(max_examples=10, deadline=None)
@given(st.data())
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float64)])
@pytest.mark.parametrize("rule", STILL.values(), ids=STILL)
def test_equals_the_dense_rule_bit_for_bit(rule, dtype, data):
    if rule is STILL["per column"]:
        rule = sgd({"table": torch.tensor([0.1, 0.2, 0.3], dtype=dtype)}, momentum=0.5)
    batches = data.draw(
        st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=4), min_size=1, max_size=4)
    )
    batches = [torch.tensor(ids) for ids in batches]
    ours, state = run(rowwise(rule), embedding, table(dtype), batches)
    theirs, dense_state = run(rule, F.embedding, table(dtype), batches)
    assert torch.equal(ours.to_dense(), theirs)
    assert ours.rows.tolist() == sorted({int(i) for ids in batches for i in ids})
    for field, dense_field in zip(state.state, dense_state, strict=True):
        if isinstance(field, dict):
            assert torch.equal(field["table"].to_dense(), dense_field["table"])


@over_rules
@pytest.mark.parametrize("memory", ["full", slow("step")])
def test_meta_gradients_of_two_orders_equal_those_through_the_dense_rule(rule, memory):
    def tower(rule, lookup):
        weight = table()
        adapted, _ = run(rule, lookup, weight, memory=memory)
        first = torch.autograd.grad(meta_loss(lookup, adapted), weight, create_graph=True)[0]
        assert first.requires_grad
        return adapted, first, torch.autograd.grad((first**3).sum(), weight)[0]

    ours, theirs = tower(rowwise(rule), embedding), tower(rule, F.embedding)
    assert isinstance(ours[0], RowTable)
    assert isinstance(ours[1], RowSparse)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.to_dense(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "make",
    [lambda h: sgd(h, momentum=h, weight_decay=h), lambda h: adam(h, weight_decay=h, decoupled=True, eps=h)],
)
def test_gradcheck_in_hyperparameters(make):
    hyper = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def fn(hyper, weight):
        return meta_loss(embedding, run(rowwise(make(hyper)), embedding, weight, BATCHES[:3])[0])

    assert mg.gradcheck(fn, (hyper, table()), order=2, directions=1)


@over_rules
def test_a_step_never_costs_the_table(rule):
    num_rows = 10**4
    weight = torch.ones(num_rows, D, dtype=torch.float64, requires_grad=True)
    batches = [ids * (num_rows // V) for ids in BATCHES]
    with no_large_outputs(limit=50 * (8 + D)):
        adapted, _ = run(rowwise(rule), embedding, weight, batches)
        loss = (embedding(torch.tensor([3, 0, num_rows - 1]), adapted) ** 2).sum()
        g = torch.autograd.grad(loss, weight, create_graph=True)[0]
        torch.autograd.grad((g**3).sum(), weight)


@over_rules
def test_writes_back_into_the_base(rule):
    weight = table()
    adapted, _ = run(rowwise(rule), embedding, weight)
    expected = adapted.detach().to_dense()
    base = adapted.write_()
    assert base.data_ptr() == weight.data_ptr()
    assert torch.equal(weight.detach(), expected)
    assert torch.equal(adapted.detach().to_dense(), expected)


def test_without_decay_steps_go_on_after_writing_back():
    rule, params, dense = rowwise(adam(0.1)), {"table": table()}, {"table": table()}
    state, dense_state = rule.init(params), adam(0.1).init(dense)
    for ids in BATCHES:
        params, state = rule.update(
            mg.grad((embedding(ids, params["table"]) ** 2).sum(), params), state, params
        )
        params["table"].write_()
        dense, dense_state = adam(0.1).update(
            mg.grad((F.embedding(ids, dense["table"]) ** 2).sum(), dense), dense_state, dense
        )
    assert torch.equal(params["table"].base, dense["table"])


def test_a_row_table_is_right_in_its_three_parts():
    rows = torch.tensor([1, 4])

    def fn(base, values, scale):
        overlaid = RowTable(base, rows, values, scale)
        return (
            embedding(torch.tensor([[0, 1], [4, 4], [2, 0]]), overlaid) ** 2,
            overlaid.to_dense() ** 2,
            overlaid.values,
        )

    leaves = (table(), table()[:2].detach().requires_grad_(), table()[2].detach().requires_grad_())
    assert mg.gradcheck(fn, leaves, order=3, directions=1)
    base, values, scale = leaves
    expected = (base * scale).index_copy(0, rows, values)
    assert torch.equal(RowTable(base, rows, values, scale).to_dense(), expected)


def test_a_row_table_in_forward_mode():
    rows, ids = torch.tensor([1, 4]), torch.tensor([0, 1])
    base, values = table().detach(), table()[:2].detach()
    fn = lambda base, values: embedding(ids, RowTable(base, rows, values)) ** 2  # noqa: E731
    dense = lambda base, values: base.index_copy(0, rows, values)[ids] ** 2  # noqa: E731
    got, expected = (torch.func.jvp(f, (base, values), (base, values * 2)) for f in (fn, dense))
    torch.testing.assert_close(got, expected)
    one = [torch.func.jvp(lambda v, f=f: f(base, v), (values,), (values,))[1] for f in (fn, dense)]
    torch.testing.assert_close(*one)
    other = [torch.func.jvp(lambda b, f=f: f(b, values), (base,), (base,))[1] for f in (fn, dense)]
    torch.testing.assert_close(*other)
    with pytest.raises(NotImplementedError, match="forward mode would scale the whole table"):
        torch.func.jvp(lambda b: embedding(ids, RowTable(b, rows, values, base[0])), (base,), (base,))


def row_table():
    return RowTable(torch.zeros(4, 2), torch.tensor([2]), torch.ones(1, 2))


def test_what_would_copy_a_row_table_is_refused():
    assert repr(row_table()) == "RowTable(1 rows of their own, shape=(4, 2), dtype=torch.float32)"
    with pytest.raises(TypeError, match=r"mul\(...\): not an operation on RowTable.*\.to_dense\(\)"):
        row_table() * 2
    with pytest.raises(NotImplementedError, match="under vmap the tables of all tasks would be copied"):
        torch.vmap(lambda b: embedding(torch.tensor([0]), RowTable(b, torch.tensor([0]), b[:1])))(
            torch.zeros(3, 4, 2)
        )


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((torch.tensor([0.0]), torch.ones(1, 2)), TypeError, "rows must be int64, got torch.float32"),
        (
            (torch.tensor([0]), torch.ones(2, 2)),
            ValueError,
            r"values must be a row.*\(4, 2\).*\(1,\).*\(2, 2\)",
        ),
        ((torch.tensor([4]), torch.ones(1, 2)), ValueError, "rows must be from 0 to 3.*got 4"),
        ((torch.tensor([1, 1]), torch.ones(2, 2)), ValueError, "rows must ascend without duplicates"),
        (
            (torch.tensor([1]), torch.ones(1, 2), torch.ones(3)),
            ValueError,
            r"scale must be a row.*\(2,\), got \(3,\)",
        ),
    ],
)
def test_parts_of_a_row_table_that_do_not_fit_are_refused(parts, error, message):
    with pytest.raises(error, match=message):
        RowTable(torch.zeros(4, 2), *parts)


@pytest.mark.parametrize(
    "rule", [adam(weight_decay=0.1), adagrad(weight_decay=torch.tensor(0.1)), rmsprop(weight_decay=0.1)]
)
def test_decay_through_a_root_is_refused(rule):
    with pytest.raises(ValueError, match="moves every row in its own way"):
        rowwise(rule)


@dataclass(frozen=True)
class Unknown:
    weight_decay: float = 0.0

    def init(self, params):
        return ()

    def update(self, grads, state, params, curvature=None):
        return params, state


def test_a_rule_of_an_unknown_kind_is_refused():
    with pytest.raises(TypeError, match="attribute decays_linearly, got Unknown"):
        rowwise(Unknown())


@pytest.mark.parametrize(
    "rule", [adam(eps=0.0), rmsprop(eps=0.0), adam(eps=0.0, weight_decay=0.1, decoupled=True)]
)
def test_a_rule_that_moves_rows_without_a_gradient_is_refused(rule):
    with pytest.raises(ValueError, match=r"moves a row of 'table' whose gradient is zero.*Is eps 0"):
        rowwise(rule).init({"table": table()})


def test_tables_and_gradients_of_another_kind_are_refused():
    rule, params = rowwise(sgd(0.1)), {"table": table()}
    state = rule.init(params)
    with pytest.raises(TypeError, match=r"gradient of 'table' must be RowSparse.*got Tensor"):
        rule.update({"table": torch.ones(V, D)}, state, params)
    for bad in (torch.ones(3), row_table()):
        with pytest.raises(ValueError, match=r"params\['table'\] must be a strided table"):
            rule.init({"table": bad})


def test_parameters_that_are_not_those_of_the_last_step_are_refused():
    rule, params = rowwise(sgd(0.1, weight_decay=0.1)), {"table": table()}
    state = rule.init(params)
    grads = mg.grad((embedding(BATCHES[0], params["table"]) ** 2).sum(), params)
    new, new_state = rule.update(grads, state, params)
    for wrong_params, wrong_state in [({"table": table()}, state), (params, new_state), (new, state)]:
        with pytest.raises(
            ValueError, match=r"must be the table that init was given, and after the first step"
        ):
            rule.update(grads, wrong_state, wrong_params)
    new["table"].write_()
    with pytest.raises(ValueError, match=r"was written into since init, by write_"):
        rule.update(grads, new_state, new)


@pytest.mark.parametrize(
    "rule",
    [
        adahessian(0.1),
        adahessian(0.1, weight_decay=0.1),
        sophia_h(0.1, curvature_every=2),
        sophia_h(0.1, weight_decay=0.1),
    ],
    ids=["adahessian", "adahessian, decay", "sophia_h", "sophia_h, decay"],
)
def test_curvature_at_rows_is_that_of_the_dense_rule(rule):
    """The loss is a sum over looked up numbers, so its Hessian is diagonal, and one probe of signs is exact."""

    def adapt(rule, lookup, weight):
        params, state = {"table": weight}, rule.init({"table": weight})
        for ids in BATCHES:
            loss = (lookup(ids, params["table"]) ** 4).sum()
            grads = mg.grad(loss, params, create_graph=True)
            curvature = TapeCurvature(params, grads, create_graph=True)
            params, state = rule.update(grads, state, params, curvature)
        return params["table"]

    (rows, dense), read = (table(), table()), torch.tensor([0, 4, 7, 1, 2])
    got = embedding(read, adapt(rowwise(rule), embedding, rows))
    expected = F.embedding(read, adapt(rule, F.embedding, dense))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    grads = [
        torch.autograd.grad((value**3).sum(), leaf)[0] for value, leaf in ((got, rows), (expected, dense))
    ]
    torch.testing.assert_close(grads[0].to_dense(), grads[1], rtol=1e-10, atol=1e-12)
