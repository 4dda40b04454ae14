"""Attention over a pattern against torch's over a mask."""

import math

import pytest
import torch

import metagrad as mg
from metagrad.sparse import Pattern
from metagrad.sparse.operations.attention import attention
from tests.sparse.towers import assert_same_tower, tower


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 2


def random_pattern(n=5, m=4, seed=0, density=0.5):
    mask = torch.rand(n, m, generator=torch.Generator().manual_seed(seed)) < density
    mask[:, 0] = True
    return Pattern.from_mask(mask)


def dense(pattern, scale=None):
    def attend(q, k, v):
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = (q @ k.mT * factor).masked_fill(~pattern.to_mask(), -torch.inf)
        return scores.softmax(-1) @ v

    return attend


def sparse(pattern, scale=None):
    return lambda q, k, v: attention(q, k, v, pattern, scale=scale)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((5, 3), (4, 3), (4, 2)),
        ((3, 5, 3), (3, 4, 3), (3, 4, 2)),
        ((2, 3, 5, 3), (3, 4, 3), (2, 1, 4, 2)),
    ],
    ids=["matrices", "heads", "broadcast"],
)
@pytest.mark.parametrize("together", [1 << 17, 30, 0], ids=["block diagonal", "in groups", "one by one"])
def test_equals_dense_attention_at_every_order(monkeypatch, q, k, v, together):
    monkeypatch.setitem(attention.__globals__, "TOGETHER", together)
    pattern = random_pattern()
    inputs = [draw(*shape, seed=i) for i, shape in enumerate((q, k, v))]
    assert_same_tower(sparse(pattern), dense(pattern), inputs)


def seeded(fn):
    def drawn(*inputs):
        torch.manual_seed(3)
        return fn(*inputs)

    return drawn


def dropped(pattern, p, heads=()):
    """Attend densely, with the factors that dropout draws for the entries."""

    def attend(q, k, v):
        factors = torch.nn.functional.dropout(torch.ones(math.prod(heads) * pattern.nnz, dtype=q.dtype), p)
        mask = pattern.to_mask()
        where = torch.zeros(*heads, *mask.shape, dtype=q.dtype)
        where[mask.expand(*heads, -1, -1)] = factors
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) * where) @ v

    return attend


class TestDropout:
    pattern = random_pattern()

    @pytest.mark.parametrize(("p", "heads"), [(0.3, ()), (0.3, (3,)), (1.0, ())])
    def test_equals_dense_attention_at_every_order(self, p, heads):
        inputs = [draw(*heads, *shape, seed=i) for i, shape in enumerate(((5, 3), (4, 3), (4, 2)))]
        fn = seeded(lambda *x: attention(*x, self.pattern, dropout_p=p))
        assert_same_tower(fn, seeded(dropped(self.pattern, p, heads)), inputs)

    def test_forward_mode_and_vmap(self):
        inputs = (draw(5, 3), draw(4, 3, seed=1), draw(4, 2, seed=2))
        tangents = tuple(draw(*x.shape, seed=7) for x in inputs)

        def fn(*x):
            return attention(*x, self.pattern, dropout_p=0.3)

        got = torch.func.jvp(seeded(fn), inputs, tangents)
        torch.testing.assert_close(got, torch.func.jvp(seeded(dropped(self.pattern, 0.3)), inputs, tangents))
        torch.manual_seed(3)
        stacked = torch.vmap(fn, randomness="same")(*(torch.stack([x, x]) for x in inputs))
        torch.testing.assert_close(stacked, torch.stack([got[0], got[0]]))


def test_a_query_without_keys_gets_zeros_and_gives_none_a_gradient():
    pattern = Pattern(torch.tensor([0, 2]), torch.tensor([1, 1]), (3, 2))
    q, k, v = (draw(*s, seed=i).requires_grad_() for i, s in enumerate(((3, 2), (2, 2), (2, 2))))
    y = attention(q, k, v, pattern)
    assert torch.equal(y[1], torch.zeros(2, dtype=torch.float64))
    for gradient in tower(sparse(pattern), [q, k, v]):
        assert gradient.isfinite().all()
    (d_q,) = torch.autograd.grad((y**3).sum(), q)
    assert torch.equal(d_q[1], torch.zeros(2, dtype=torch.float64))


def test_a_pattern_without_entries_gives_zeros():
    pattern = Pattern(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), (3, 2))
    q, k, v = draw(2, 3, 2), draw(2, 2, 2), draw(2, 2, 4)
    assert torch.equal(attention(q, k, v, pattern), torch.zeros(2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e3, -1e3])
def test_large_scores_do_not_overflow(size):
    pattern = Pattern.banded(3, 1, 1)
    q, k = torch.full((3, 1), size), torch.tensor([[1.0], [2.0], [4.0]])
    v = torch.tensor([[1.0], [2.0], [3.0]])
    best = [[2.0], [3.0], [3.0]] if size > 0 else [[1.0], [1.0], [2.0]]
    assert attention(q, k, v, pattern).tolist() == best
    assert all(g.isfinite().all() for g in tower(sparse(pattern), [q, k, v], order=2))


def test_many_keys_in_float16():
    """The sum of the weights of 70,000 keys overflows there."""
    num = 70_000
    pattern = Pattern(torch.zeros(num, dtype=torch.int64), torch.arange(num), (1, num))
    q, k, v = (torch.full((rows, 1), 2.0, dtype=torch.float16) for rows in (1, num, num))
    assert attention(q, k, v, pattern).tolist() == [[2.0]]


class TestTransforms:
    pattern = random_pattern()
    inputs = (draw(2, 5, 3), draw(2, 4, 3, seed=1), draw(2, 4, 2, seed=2))

    def test_vmap_over_all_and_over_one(self):
        fn, oracle = sparse(self.pattern), dense(self.pattern)
        q, k, v = self.inputs
        torch.testing.assert_close(torch.vmap(fn)(q, k, v), oracle(q, k, v))
        got = torch.vmap(fn, in_dims=(None, 0, None))(q[0], k, v[0])
        torch.testing.assert_close(got, oracle(q[:1], k, v[:1]))

    def test_forward_mode(self):
        tangents = tuple(draw(*x.shape, seed=7) for x in self.inputs)
        got = torch.func.jvp(sparse(self.pattern), self.inputs, tangents)
        expected = torch.func.jvp(dense(self.pattern), self.inputs, tangents)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_recomputed_in_an_unroll_on_a_pattern_whose_maps_are_not_known_yet(dropout_p):
    x = draw(3, 20, 4).requires_grad_()

    def derivative(memory):
        torch.manual_seed(0)
        pattern = Pattern.banded(20, 2, 2)

        def step(x, t):
            y = attention(x, x, x, pattern, dropout_p=dropout_p)
            return x - 0.1 * mg.grad((y**3).sum(), x, create_graph=True), None

        return mg.grad(mg.unroll(step, x, steps=3, memory=memory)[0].square().sum(), x)

    torch.testing.assert_close(derivative("step"), derivative("full"))


class TestMemory:
    def test_the_forward_keeps_one_number_for_each_entry(self):
        pattern = Pattern.banded(100, 20, 20)
        inputs = [draw(100, 2, seed=i).requires_grad_() for i in range(3)]
        kept = {}

        def pack(tensor):
            if tensor.numel() >= pattern.nnz:
                kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = attention(*inputs, pattern)
        assert len(kept) == 1
        assert y.requires_grad

    @pytest.mark.parametrize("order", [1, 2, 3])
    def test_the_peak_grows_with_the_entries(self, order):
        peaks = [peak(n, band, order) for n, band in ((256, 16), (512, 16), (256, 32))]
        assert peaks[1] / peaks[0] == pytest.approx(2.0, rel=0.1)
        assert peaks[2] / peaks[0] < 2.1


def peak(n, band, order):
    pattern = Pattern.banded(n, band, band)
    tower(sparse(pattern), [draw(n, 8, seed=i) for i in range(3)], order)  # the pattern's maps are made once
    with mg.MemoryTracker("cpu") as memory:
        tower(sparse(pattern), [draw(n, 8, seed=i) for i in range(3)], order)
    return memory.peak
