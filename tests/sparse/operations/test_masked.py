import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from metagrad.sparse.operations.masked import mask_gradient, masked_mean, masked_softmax, masked_sum
from tests.draws import draw
from tests.sparse.towers import tower

MASKS = {
    "mixed": torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0]], dtype=torch.bool),
    "an empty row": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.bool),
    "empty": torch.zeros(3, 4, dtype=torch.bool),
    "shared by the rows": torch.tensor([True, False, True, True]),
    "shared by the columns": torch.tensor([[True], [False], [True]]),
}


def rows(x, mask, reduce):
    """Apply ``reduce`` to the valid entries of each row."""
    return torch.stack([reduce(row[keep]) for row, keep in zip(x, mask.expand(x.shape), strict=True)])


def mean(valid):
    return valid.mean() if valid.numel() else valid.sum()


def softmax_rows(x, mask):
    """Return the softmax of the valid entries of each row, and zeros elsewhere."""
    return torch.stack(
        [
            torch.zeros_like(row).index_put((keep.nonzero()[:, 0],), row[keep].softmax(0))
            for row, keep in zip(x, mask.expand(x.shape), strict=True)
        ]
    )


CASES = {
    "sum of rows": (lambda x, m: masked_sum(x, m, 1), lambda x, m: rows(x, m, torch.sum)),
    "sum of columns, kept": (
        lambda x, m: masked_sum(x, m, -2, keepdim=True),
        lambda x, m: rows(x.T, m.expand(x.shape).T, torch.sum)[None],
    ),
    "mean": (masked_mean, lambda x, m: mean(x[m.expand(x.shape)])),
    "mean of rows": (lambda x, m: masked_mean(x, m, -1), lambda x, m: rows(x, m, mean)),
    "softmax of rows": (lambda x, m: masked_softmax(x, m, 1), softmax_rows),
    "softmax of columns": (
        lambda x, m: masked_softmax(x, m, 0),
        lambda x, m: softmax_rows(x.T, m.expand(x.shape).T).T,
    ),
}
case = pytest.mark.parametrize(("masked", "oracle"), CASES.values(), ids=CASES)


def spoiled(x, mask):
    """Return values with nan, inf and -inf where the mask is False."""
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype).repeat(x.numel())[: x.numel()]
    return torch.where(mask, x, bad.view(x.shape))


@case
def test_derivatives_are_those_of_the_valid_entries(masked, oracle):
    x = draw(3, 4) / 3
    for mask in MASKS.values():
        bad = spoiled(x, mask)
        torch.testing.assert_close(masked(bad, mask), oracle(x, mask))
        got = tower(lambda x, m=mask: masked(x, m), [bad])
        expected = tower(lambda x, m=mask: oracle(x, m), [x])
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        for g in got:
            assert (g[~mask.expand(x.shape)] == 0).all()


@case
def test_infinite_cotangents_of_what_is_invalid_do_not_come_back(masked, oracle):
    mask = MASKS["an empty row"]
    x = spoiled(draw(3, 4), mask).requires_grad_()
    y = masked(x, mask)
    cotangent = torch.where(y == 0, math.inf, 1.0) if y.ndim and (y == 0).any() else torch.ones_like(y)
    (g,) = torch.autograd.grad(y, x, cotangent)
    assert g.isfinite().all()
    assert (g[~mask] == 0).all()


@case
def test_forward_mode_is_the_transpose_of_reverse_mode(masked, oracle):
    mask = MASKS["an empty row"]
    x, tangent = spoiled(draw(3, 4), mask), spoiled(draw(3, 4, seed=1), mask)
    y, pushed = jvp(lambda x: masked(x, mask), (x,), (tangent,))
    cotangent = draw(*y.shape, seed=2)
    (pulled,) = vjp(lambda x: masked(x, mask), x)[1](cotangent)
    torch.testing.assert_close((pushed * cotangent).sum(), (pulled * tangent)[mask].sum())


@case
def test_vmap_and_func_grad_equal_the_loop(masked, oracle):
    xs, masks = draw(5, 3, 4), draw(5, 3, 4, seed=1) > 0
    fn = grad(lambda x, m: masked(x, m).pow(3).sum())
    torch.testing.assert_close(
        vmap(fn)(spoiled(xs, masks), masks), torch.stack([fn(x, m) for x, m in zip(xs, masks, strict=True)])
    )


@pytest.mark.parametrize("function", ["mean of rows", "softmax of rows", "mask_gradient"])
def test_compiles_whole_and_once_for_all_values_of_a_mask(function):
    masked = CASES[function][0] if function in CASES else lambda x, m: mask_gradient(x, m)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(masked, fullgraph=True, backend=counter)
    for name in ("mixed", "an empty row", "empty"):
        x = draw(3, 4).requires_grad_()
        y, expected = compiled(x, MASKS[name]), masked(x, MASKS[name])
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(*(torch.autograd.grad(v.pow(3).sum(), x)[0] for v in (y, expected)))
    assert counter.frame_count == 1


def test_the_mean_of_many_halves_does_not_overflow():
    x = torch.full((70_000,), 2.0, dtype=torch.float16)
    assert masked_mean(x, torch.ones(70_000, dtype=torch.bool)).item() == 2.0


def test_a_row_without_valid_entries_makes_no_nan_inside():
    x = draw(2, 3).requires_grad_()
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        masked_softmax(x, torch.zeros(2, 3, dtype=torch.bool), 1).sum().backward()
    assert (x.grad == 0).all()


def through(x):
    return x.sin() * x.sum(0).exp()


@pytest.mark.parametrize("name", ["mixed", "an empty row", "shared by the rows"])
def test_masked_gradients_are_those_of_a_function_of_the_unmasked_entries(name):
    mask, x = MASKS[name].expand(3, 4), draw(3, 4)
    got = tower(lambda x: through(mask_gradient(x, mask)), [x])
    expected = tower(lambda v: through(x.masked_scatter(mask, v)), [x[mask]])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[mask], b, rtol=1e-10, atol=1e-10)
        assert (a[~mask] == 0).all()


def test_a_masked_gradient_drops_infinite_cotangents_at_every_order():
    x, mask = torch.tensor([0.0, 4.0], dtype=torch.float64, requires_grad=True), torch.tensor([False, True])
    (first,) = torch.autograd.grad(mask_gradient(x, mask).sqrt().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
    assert first.tolist() == [0.0, 0.25]
    assert second.tolist() == [0.0, -0.015625]


def test_masked_second_derivatives_agree_in_all_modes():
    x, mask = draw(3, 4), MASKS["mixed"]

    def fn(x):
        return through(mask_gradient(x, mask)).sum()

    reverse = jacrev(jacrev(fn))(x)
    assert (reverse[~mask] == 0).all()
    assert (reverse.movedim((2, 3), (0, 1))[~mask] == 0).all()
    for other in (hessian(fn), jacfwd(jacfwd(fn)), jacrev(jacfwd(fn))):
        torch.testing.assert_close(other(x), reverse)
