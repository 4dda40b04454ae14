import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import metagrad as mg
from metagrad.sparse.tables.embedding import embedding
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.draws import leaf
from tests.sparse.guards import no_large_outputs

V, D = 7, 2


def row_sparse(rows=(1, 4, 6), seed=0, shape=(V, D)):
    return RowSparse(torch.tensor(rows), leaf(len(rows), *shape[1:], seed=seed), shape)


def gradient(table, ids=(0, 3, 3, 5), lookup=embedding):
    loss = (lookup(torch.tensor(ids), table) ** 3).sum()
    return torch.autograd.grad(loss, table, create_graph=True)[0]


# Uses of a gradient g of a table and a dense tensor d. Values and derivatives to order three with respect to the
# table and d are compared with the dense gradient of F.embedding.
USES = {
    "neg": lambda g, d: -g,
    "scalar": lambda g, d: 2 * g + g * 3 - g / 4 + 0,
    "sum of two": lambda g, d: g + 2 * g - 0.5 * g**2,
    "product": lambda g, d: g * g * g,
    "dense product": lambda g, d: d * g + g * d,
    "column": lambda g, d: g * d[:, :1],
    "quotient": lambda g, d: g / (1 + d**2),
    "powers": lambda g, d: g**2 + g**3 + g.square() + g.pow(1),
    "abs": lambda g, d: g.abs() * g + g.sign() + g.sgn() * g,
    "dense plus": lambda g, d: d + g,
    "step": lambda g, d: torch.sub(d, g, alpha=0.1),
    "sum": lambda g, d: g.sum() * g.mean(),
    "sum of rows": lambda g, d: g.sum(0) + g.mean(dim=0, keepdim=True),
    "sum in rows": lambda g, d: g.sum(-1, keepdim=True) * g,
    "norm": lambda g, d: g.norm() * torch.norm(g, 3) + torch.linalg.vector_norm(g, 4),
    "extremes": lambda g, d: g.max() ** 2 + g.min() ** 3 + (g * 0 + d).max(),
    "select": lambda g, d: g.index_select(0, torch.tensor([3, 1, 3, 0])) ** 2,
    "lookup": lambda g, d: embedding(torch.tensor([[3, 1], [3, 0]]), g) ** 2,
    "view": lambda g, d: g.view(V, 1, D) * g.view(V, 1, D),
    "slices": lambda g, d: (g[2:6] * d[2:6])[:, 1:] * d[:4, :1],
}


def dense(x):
    return x.to_dense() if isinstance(x, RowSparse) else x


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_uses_of_a_gradient_equal_dense_ones_to_order_three(use):
    def tower(lookup):
        table, other = leaf(V, D), leaf(V, D, seed=1)
        result = use(gradient(table, lookup=lookup), other)
        found, level = [result], (dense(result) ** 3).sum() + other.pow(3).sum()
        for _ in range(3):
            grads = torch.autograd.grad(level, (table, other), create_graph=True)
            assert all(g.requires_grad for g in grads)
            found += grads
            level = sum((dense(g) ** 3).sum() for g in grads) / 1e3
        return [dense(f).detach() for f in found]

    for got, expected in zip(tower(embedding), tower(F.embedding), strict=True):
        torch.testing.assert_close(got, expected.view_as(got), rtol=1e-9, atol=1e-9)


def test_non_linear_uses_of_the_gradient_are_right_to_order_four_in_closed_form():
    """Squared gradients of gradients of w**2 are exact at w = 3."""
    table = torch.full((3, 1), 3.0, dtype=torch.float64, requires_grad=True)
    level = (embedding(torch.tensor([1]), table) ** 2).sum()
    values = []
    for _ in range(4):
        g = torch.autograd.grad(level, table, create_graph=True)[0]
        assert isinstance(g, RowSparse)
        assert g.requires_grad
        assert g.rows.tolist() == [1]
        values.append(g.values.item())
        level = (g**2).sum() * embedding(torch.tensor([1]), table).sum()
    # Derivatives: 2w of w^2, 12w^2 of 4w^3, 720w^4 of 144w^5, 4665600w^8 of 518400w^9.
    assert values == pytest.approx([6.0, 12 * 9.0, 720 * 81.0, 4665600 * 3.0**8], rel=1e-13)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, V - 1), max_size=6), st.lists(st.integers(0, V - 1), max_size=6))
def test_coalesce_and_sums_equal_dense_ones(first, second):
    def made(ids, seed):
        values = leaf(len(ids), D, seed=seed)
        whole = torch.zeros(V, D, dtype=torch.float64).index_add(
            0, torch.tensor(ids, dtype=torch.int64), values
        )
        return RowSparse.from_rows(torch.tensor(ids, dtype=torch.int64), values, (V, D)), whole, values

    (x, dense_x, values), (y, dense_y, _) = made(first, 0), made(second, 1)
    assert x.rows.tolist() == sorted(set(first))
    for got, expected in [
        (x, dense_x),
        (x + y, dense_x + dense_y),
        (x - 2 * y, dense_x - 2 * dense_y),
        (x * y, dense_x * dense_y),
    ]:
        torch.testing.assert_close(got.to_dense(), expected)
    torch.testing.assert_close((x + y).norm(), (dense_x + dense_y).norm())
    torch.testing.assert_close(x.norm(float("inf")), dense_x.norm(float("inf")))
    got, expected = (torch.autograd.grad((z**3).sum(), values)[0] for z in (x + y, dense_x + dense_y))
    torch.testing.assert_close(got, expected)


def dense_loss(table):
    return (table**3).sum()


def row_loss(table):
    return (embedding(torch.tensor([1, 4, 4]), table) ** 2).sum()


@pytest.mark.parametrize("losses", [(dense_loss, row_loss), (row_loss, row_loss, dense_loss, row_loss)])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_dense_and_sparse_gradients_accumulate_without_losing_either(losses, create_graph):
    table = leaf(V, D)
    for loss in losses:
        loss(table).backward(create_graph=create_graph)
    (expected,) = torch.autograd.grad(sum(loss(table) for loss in losses), table)
    torch.testing.assert_close(dense(table.grad), dense(expected))
    table.grad = None


def test_a_table_used_densely_as_well_gets_a_dense_gradient():
    def loss(lookup, table):
        return ((lookup(torch.tensor([1, 4]), table) @ table.t()) ** 2).sum()

    assert type(torch.autograd.grad(loss(embedding, w := leaf(V, D)), w)[0]) is torch.Tensor
    assert mg.gradcheck(lambda table: loss(embedding, table), leaf(V, D), order=3)


def test_updates_in_place_touch_the_rows_alone():
    table, g = leaf(V, D).detach(), row_sparse()
    before = table.clone()
    table.add_(g.detach(), alpha=-0.5)
    torch.testing.assert_close(table, before - 0.5 * g.detach().to_dense())
    table.sub_(g.detach())
    table += g.detach()
    torch.testing.assert_close(table, before - 0.5 * g.detach().to_dense())
    table.copy_(g.detach())
    assert torch.equal(table, g.detach().to_dense())


def test_writes_in_place_are_seen_by_detached_aliases():
    x = row_sparse().detach()
    alias, before = x.detach(), x.to_dense()
    alias.mul_(2).add_(row_sparse(rows=(0, 4)).detach()).sub_(x * 0).div_(2).neg_()
    torch.testing.assert_close(x.to_dense(), -(before + 0.5 * row_sparse(rows=(0, 4)).detach().to_dense()))
    x.copy_(row_sparse(rows=(3,)).detach())
    assert alias.rows.tolist() == [3]
    x.zero_()
    assert alias.rows.tolist() == []
    assert not alias.to_dense().any()


def test_coo_is_a_detached_hybrid_tensor():
    x = row_sparse()
    coo = x.to_coo()
    assert coo.is_coalesced()
    assert coo.sparse_dim() == 1
    assert not coo.requires_grad
    assert torch.equal(coo.to_dense(), x.to_dense())


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, maximize=True),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_step_on_rows_as_on_the_gradient_of_their_own_embedding(name):
    own, theirs = (nn.Embedding(V, D, sparse=True, dtype=torch.float64) for _ in range(2))
    own.load_state_dict(theirs.state_dict())
    losses = [lambda ids: embedding(ids, own.weight), theirs]
    for loss, table in zip(losses, (own, theirs), strict=True):
        optimizer, scaler = OPTIMIZERS[name](table.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
        for ids in ([3, 1, 3], [1, 5]):
            optimizer.zero_grad()
            scaler.scale(loss(torch.tensor(ids)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(own.weight, theirs.weight, rtol=1e-12, atol=0)


def test_other_optimizers_of_torch_refuse_rows_as_they_refuse_sparse_gradients():
    table = leaf(V, D)
    embedding(torch.tensor([1]), table).sum().backward()
    with pytest.raises(RuntimeError, match=r"Adam does not support sparse gradients, .* SparseAdam"):
        torch.optim.Adam([table]).step()


def test_copies_and_types():
    x = row_sparse()
    assert torch.equal(copy.deepcopy(x.detach()).to_dense(), x.detach().to_dense())
    assert torch.equal(pickle.loads(pickle.dumps(x.detach())).to_dense(), x.detach().to_dense())
    assert x.float().dtype == torch.float32
    assert torch.zeros_like(x).rows.tolist() == []
    assert (x.float() + x).dtype == torch.float64
    assert x.shape == (V, D)
    assert len(x) == V
    assert repr(row_sparse((2,)).detach()).startswith("RowSparse(rows=tensor([2]), shape=(7, 2), values=")
    assert "requires_grad=True" in repr(x)


def test_values_and_rows_are_on_the_tape():
    values = leaf(2, D)
    x = RowSparse(torch.tensor([1, 3]), values, (V, D))
    assert torch.equal(x.values, values)
    assert mg.gradcheck(lambda v: RowSparse(torch.tensor([1, 3]), v, (V, D)).values ** 2, values, order=3)
    assert mg.gradcheck(lambda v: RowSparse(torch.tensor([1, 3]), v, (V, D)).to_dense() ** 2, values, order=3)


def test_a_stack_of_tables_counts_rows_through():
    values = leaf(3, D)
    x = RowSparse(torch.tensor([0, 2, 4]), values, (2, 3, D))
    whole = x.to_dense()
    assert torch.equal(whole[1, 1], values[2])
    for got, expected in [
        (x.sum(0), whole.sum(0)),
        (x.sum(1), whole.sum(1)),
        (x.sum((0, 1)), whole.sum((0, 1))),
        (x.sum(dim=(1, 2), keepdim=True), whole.sum((1, 2), keepdim=True)),
        (x.mean(0), whole.mean(0)),
        (x * whole.sum(0), whole * whole.sum(0)),
        (x * whole[:, :1], whole * whole[:, :1]),
        (x.permute(1, 0, 2), whole.permute(1, 0, 2)),
        (x.view(6, D), whole.view(6, D)),
        (x.view(3, 2, -1), whole.view(3, 2, -1)),
        (whole.sum(0) - x, whole.sum(0) - whole),
    ]:
        torch.testing.assert_close(dense(got), expected)
    assert torch.equal(x.to_coo().to_dense(), whole.detach())
    with torch.no_grad():
        torch.testing.assert_close(whole.clone().add_(x), 2 * whole)


DENSE = {
    "exp": lambda x: x.exp(),
    "eq": lambda x: x == 0,
    "reciprocal": lambda x: 1 / x,
    r"pow\(x, 0\)": lambda x: x**0,
    "div": lambda x: x / x,
    "t": lambda x: x @ x.t(),
    "select": lambda x: x[0],
    "argmax": lambda x: x.argmax(),
    r"max\(x, ...\)": lambda x: x.max(0),
    "norm": lambda x: x.norm(dim=0),
    r"view\(x, \(14,\)\)": lambda x: x.view(-1),
    r"mul\(x, y\) of shapes": lambda x: x * torch.ones(2, 1, 1, dtype=torch.float64),
    r"add\(x, y\) of shapes": lambda x: x + torch.ones(D, dtype=torch.float64),
    r"add_\(x, y\) of shapes": lambda x: torch.ones(2, V, D, dtype=torch.float64).add_(x),
    r"div\(x, y\)": lambda x: torch.div(x, 2.0, rounding_mode="floor"),
    "permute": lambda x: x.permute(1, 0),
    r"mul\(..., out\)": lambda x: torch.mul(x, 2.0, out=torch.zeros(V, D, dtype=torch.float64)),
}


@pytest.mark.parametrize("operation", DENSE)
def test_what_would_be_dense_is_refused_with_the_way_out(operation):
    with pytest.raises(TypeError, match=rf"({operation}).*: not an operation on RowSparse.*\.to_dense\(\)"):
        DENSE[operation](row_sparse())


def test_norms_that_torch_composes():
    x = row_sparse().detach()
    torch.testing.assert_close(torch.linalg.norm(x), torch.linalg.norm(x.to_dense()))
    table = leaf(V, D)
    table.grad = row_sparse().detach()
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_([table], 1.0), row_sparse().detach().norm())
    torch.testing.assert_close(table.grad.norm(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=0)


def test_nothing_is_ever_as_large_as_the_table():
    num_rows = 10**6
    table, other = leaf(num_rows, D, dtype=torch.float32), leaf(num_rows, D, seed=1, dtype=torch.float32)
    with no_large_outputs(limit=50 * (20 + D)):
        level = (embedding(torch.arange(0, num_rows, num_rows // 20), table) ** 3).sum()
        for _ in range(4):
            g = torch.autograd.grad(level, table, create_graph=True)[0]
            assert isinstance(g, RowSparse)
            level = (g**3).sum() + (g * other).sum() + (g * g * other).sum() + g.norm() ** 4 + g.abs().mean()
            level = level + ((g / 2 + 0.5 * g - g * other) ** 2).sum(0).sum()
        level.backward()
        assert isinstance(other.grad, RowSparse)
        with torch.no_grad():
            table.sub_(table.grad, alpha=0.1)


def test_memory_of_zeros_without_memory_is_never_read():
    """The second derivative of abs is such a tensor. A RowSparse once read it as if it had memory."""
    table = leaf(V, D)
    level = gradient(table).abs().sum()
    for _ in range(3):
        g = torch.autograd.grad(level, table, create_graph=True)[0]
        level = (g * g.abs()).sum() + g.abs().sum()
    assert g.values.isfinite().all()
