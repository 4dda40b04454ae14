import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

import metagrad as mg
from metagrad.sparse.tables.embedding import embedding, embedding_bag
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.draws import leaf
from tests.sparse.bags import bags
from tests.sparse.guards import no_large_outputs

V, D = 6, 2
OTHER = torch.randn(V, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def dense(x):
    return x.to_dense() if isinstance(x, RowSparse) else x


def assert_same(got, expected, *, rtol=1e-9):
    torch.testing.assert_close(dense(got), dense(expected), rtol=rtol, atol=1e-10)


IDS = st.lists(st.integers(0, V - 1), min_size=1, max_size=8).map(torch.tensor)
PADDING = st.none() | st.integers(-V, V - 1)


@settings(max_examples=15, deadline=None)
@given(IDS, PADDING, st.sampled_from([torch.float32, torch.float64]))
def test_equals_torch_with_any_ids_to_order_three(ids, padding_idx, dtype):
    def tower(lookup):
        table, found = leaf(V, D, dtype=dtype), []
        level = [lookup(ids, table, padding_idx=padding_idx)]
        for _ in range(3):
            found += level
            total = sum((dense(x) ** 3).sum() for x in level) + table.pow(4).sum()
            level = torch.autograd.grad(total / 10, table, create_graph=True)
            assert level[0].requires_grad
        return [*found, *level]

    for got, expected in zip(tower(embedding), tower(F.embedding), strict=True):
        assert_same(got, expected, rtol=1e-4 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("shape", [(), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("width", [(2,), (2, 3)])
def test_shapes(shape, width):
    ids, table = torch.randint(0, V, shape, dtype=torch.int32), leaf(V, *width)
    found = embedding(ids, table)
    assert torch.equal(found, table[ids.long()])
    assert torch.autograd.grad(found.sum(), table)[0].shape == table.shape


def test_without_ids_the_gradient_has_no_rows_at_any_order():
    """F.embedding raises at order two there."""
    table = leaf(V, D)
    for shape in ((0,), (0, 2)):
        looked_up = embedding(torch.empty(shape, dtype=torch.int64), table)
        (first,) = torch.autograd.grad((looked_up**3).sum(), table, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), table)
        assert first.rows.tolist() == []
        assert not second.to_dense().any()


def loss(table, ids, lookup=embedding):
    return (lookup(ids, table).tanh() ** 3).sum()


def stepped(table, ids, lookup=embedding):
    return loss(table - 0.1 * grad(loss)(table, ids, lookup), ids, lookup)


def squared(table, ids, lookup=embedding):
    g = grad(loss)(table, ids, lookup)
    return (g**2).sum() + (g * OTHER).sum() + (g.abs() * g).mean() + (2 * g / 3 - g).sum()


@pytest.mark.parametrize("fn", [loss, stepped, squared])
def test_func_grad_of_grad(fn):
    table, ids = leaf(V, D).detach(), torch.tensor([0, 2, 2, 5])
    assert_same(grad(fn)(table, ids), grad(fn)(table, ids, F.embedding))


@pytest.mark.parametrize("fn", [loss, stepped, grad(squared)])
@pytest.mark.parametrize("in_dims", [(None, 1), (0, None), (1, 0)], ids=str)
def test_vmap(fn, in_dims):
    ids = torch.randint(0, V, (3, 4), generator=torch.Generator().manual_seed(1))
    table = leaf(3, V, D).detach()
    arguments = (
        table[0] if in_dims[0] is None else table.movedim(0, in_dims[0]),
        ids[0] if in_dims[1] is None else ids.movedim(0, in_dims[1]),
    )
    got = vmap(fn, in_dims)(*arguments)
    expected = vmap(lambda t, i: fn(t, i, F.embedding), in_dims)(*arguments)
    assert_same(got, expected)


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_one_backward_through_a_stack_of_tables(padding_idx):
    """The forward is batched and the backward is not, as metagrad.MAML takes the gradients of all tasks.

    The oracle is a loop: F.embedding under vmap gives padding a gradient in every table but the first.
    """
    ids = torch.randint(0, V, (3, 4), generator=torch.Generator().manual_seed(1))

    def run(lookup):
        tables = leaf(3, V, D)
        one = lambda t, i: lookup(i, t, padding_idx=padding_idx)  # noqa: E731
        if lookup is embedding:
            found = vmap(one)(tables, ids)
        else:
            found = torch.stack([one(t, i) for t, i in zip(tables, ids, strict=True)])
        first = torch.autograd.grad((found**3).sum(), tables, create_graph=True)[0]
        second = torch.autograd.grad((first**3).sum(), tables, create_graph=True)[0]
        return found, first, second, torch.autograd.grad((second**2).sum(), tables)[0]

    got = run(embedding)
    assert all(isinstance(g, RowSparse) for g in got[1:])
    for a, b in zip(got, run(F.embedding), strict=True):
        assert_same(a, b)


def test_forward_mode_over_forward_mode():
    """torch calls the jvp of a custom Function with forward mode off, which would lose the tangent's tangent."""
    table, tangent, ids = leaf(5, 2).detach(), leaf(5, 2, seed=1).detach(), torch.tensor([0, 3, 3])

    def second(lookup):
        def first(t):
            return jvp(lambda t: lookup(ids, t.sin()).pow(3).sum(), (t,), (tangent,))[1]

        return jvp(first, (table,), (tangent,))[1]

    assert_same(second(embedding), second(F.embedding))


def test_the_third_derivative_of_a_power_inside_torch_func_raises_and_says_how():
    """There x**2 is differentiated by torch's formula, whose second derivative holds x**0: one in every row."""
    table, ids = leaf(V, D).detach(), torch.tensor([1])
    third = grad(lambda t: grad(lambda t: (grad(loss)(t, ids) ** 2).sum())(t).sum())
    with pytest.raises(TypeError, match=r"pow\(x, 0.0\): not an operation on RowSparse"):
        third(table)


@pytest.mark.parametrize("memory", ["full", "step"])
def test_inside_an_unroll_and_a_checkpoint(memory):
    ids = torch.tensor([0, 2, 2, 5])

    def run(lookup, table):
        def step(w, t):
            inner = mg.checkpoint(lambda w: (lookup(ids, w).tanh() ** 2).sum() + lookup(ids, table).sum(), w)
            return w - 0.1 * mg.grad(inner, w, create_graph=True), inner

        last, _ = mg.unroll(step, table, steps=2, memory=memory)
        return (lookup(ids, last) ** 3).sum()

    assert mg.gradcheck(lambda t: run(embedding, t), leaf(V, D), order=2)


BAGS = st.tuples(st.lists(st.lists(st.integers(0, V - 1), max_size=3), min_size=1, max_size=4), PADDING)


def flattened(bag_lists):
    ids = torch.tensor([i for bag in bag_lists for i in bag], dtype=torch.int64)
    starts = [sum(map(len, bag_lists[:k])) for k in range(len(bag_lists))]
    return ids, torch.tensor(starts, dtype=torch.int64)


@settings(max_examples=15, deadline=None)
@given(BAGS, st.sampled_from(["sum", "mean", "max"]), st.booleans())
def test_bags_equal_their_definition_to_order_three(drawn, mode, weighted):
    bag_lists, padding_idx = drawn
    ids, offsets = flattened(bag_lists)
    weighted = weighted and mode == "sum"

    def tower(fn, name):
        table, weights, found = leaf(V, D), leaf(len(ids), seed=1), []
        how = {"mode": mode, "padding_idx": padding_idx} | ({name: weights} if weighted else {})
        level = [fn(ids, offsets, table, **how)]
        for _ in range(3):
            found += level
            total = sum((dense(x) ** 3).sum() for x in level) / 10 + table.pow(3).sum() + weights.pow(3).sum()
            level = torch.autograd.grad(total, (table, weights), create_graph=True)
        return [*found, *level]

    ours, theirs = tower(embedding_bag, "per_sample_weights"), tower(bags, "weights")
    for got, expected in zip(ours, theirs, strict=True):
        assert_same(got, expected)


def test_of_equal_maxima_the_first_has_the_gradient():
    table = torch.ones(3, 1, requires_grad=True)
    y = embedding_bag(torch.tensor([[2, 0, 1]]), None, table, mode="max")
    assert torch.autograd.grad(y.sum(), table)[0].to_dense().flatten().tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "look_up", [embedding, lambda ids, t, **how: embedding_bag(ids[None], None, t, **how)]
)
def test_an_id_that_was_nan_is_no_padding(look_up):
    ids = torch.tensor([0.0, float("nan")], dtype=torch.float64).long()
    with pytest.raises(ValueError, match="from 0 to 2"):
        look_up(ids, torch.ones(3, 1), padding_idx=1)


def test_a_nan_in_a_bag_is_its_maximum():
    table = torch.tensor([[1.0], [float("nan")], [-float("inf")]])
    y = embedding_bag(torch.tensor([0, 1, 2]), torch.tensor([0, 2]), table, mode="max").flatten().tolist()
    assert y[0] != y[0]
    assert y[1] == -float("inf")
    ids = torch.tensor([[0, 2]])
    assert embedding_bag(ids, None, table, mode="max", padding_idx=0).item() == -float("inf")


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("padding_idx", "in_dims"), [(None, (None, 0, None)), (2, (0, 0, 0))])
def test_bags_under_vmap(mode, padding_idx, in_dims):
    ids = torch.randint(0, V, (3, 4), generator=torch.Generator().manual_seed(1))
    offsets, table = torch.tensor([[0, 1, 3], [0, 0, 2], [0, 4, 4]]), leaf(3, V, D).detach()
    arguments = [x if d == 0 else x[0] for x, d in zip((table, ids, offsets), in_dims, strict=True)]

    def one(t, i, o):
        return (embedding_bag(i, o, t, mode=mode, padding_idx=padding_idx) ** 2).sum()

    got = vmap(grad(one), in_dims)(*arguments)
    for k in range(3):
        expected = grad(one)(*(x[k] if d == 0 else x for x, d in zip(arguments, in_dims, strict=True)))
        assert_same(got.to_dense()[k], expected)


def test_nothing_is_ever_as_large_as_the_table():
    num_rows = 10**6
    table = leaf(num_rows, D, dtype=torch.float32)
    ids = torch.arange(0, num_rows, num_rows // 20)
    weights = ids.view(4, 5) / num_rows
    with no_large_outputs(limit=50 * (20 + D)):
        for fn in (
            lambda t: embedding(ids, t),
            lambda t: embedding(ids, t, padding_idx=0),
            lambda t: embedding_bag(ids.view(4, 5), None, t, mode="sum", per_sample_weights=weights),
            lambda t: embedding_bag(ids.view(4, 5), None, t, mode="mean", padding_idx=0),
            lambda t: embedding_bag(ids, torch.tensor([0, 3, 3]), t, mode="max"),
            lambda t: vmap(lambda i: embedding(i, t))(ids.view(4, 5)),
        ):
            first = torch.autograd.grad((fn(table) ** 3).sum(), table, create_graph=True)[0]
            second = torch.autograd.grad((first**3).sum(), table, create_graph=True)[0]
            torch.autograd.grad((second**3).sum(), table)
        grad(lambda t: (grad(loss)(t, ids) ** 2).sum())(table.detach())
        vmap(grad(loss), (None, 0))(table.detach(), ids.view(4, 5))
