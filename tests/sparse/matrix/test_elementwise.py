from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from metagrad.sparse import Pattern, SparseTensor
from metagrad.sparse.matrix.tensor import Elementwise
from metagrad.sparse.operations import arithmetic as elementwise
from tests.sparse.cases import zero_keeping

PATTERN = Pattern(torch.tensor([0, 1]), torch.tensor([1, 0]), (2, 2))
REFUSED = [n for n in vars(Elementwise) if not n.startswith("_") and n not in zero_keeping()]


def matrix(*values):
    return SparseTensor(PATTERN, torch.tensor(values, requires_grad=True))


@pytest.mark.parametrize("name", zero_keeping())
def test_a_function_that_is_zero_at_zero_keeps_pattern_and_blocks(name):
    blocks = SparseTensor(PATTERN, torch.full((2, 1, 3), 0.3))
    result = getattr(blocks, name)()
    assert result.pattern is PATTERN
    assert torch.equal(result.values, getattr(torch, name)(blocks.values))
    assert name in getattr(Elementwise, name).__doc__


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_is_not_zero_at_zero_is_refused_with_the_way_out(name):
    a = matrix(0.5, 0.6)
    with pytest.raises(
        TypeError, match=rf"{name}\(0\) is .*a\.with_values\(a\.values\.{name}\(\)\).*to_dense"
    ):
        getattr(a, name)()
    getattr(a.values, name)()  # the way out exists


def test_the_table_has_what_torch_has_for_sparse_tensors():
    asked = {
        "relu",
        "abs",
        "sin",
        "tan",
        "tanh",
        "sinh",
        "asin",
        "atan",
        "asinh",
        "atanh",
        "expm1",
        "log1p",
        "sqrt",
    }
    assert asked <= set(zero_keeping())
    assert {"exp", "cos", "log", "sigmoid", "reciprocal"} <= set(REFUSED)


def test_zero_to_a_power_is_torch_s():
    a = matrix(0.0, 2.0)
    (g,) = torch.autograd.grad((a**2).values.sum(), a.values, create_graph=True)
    assert g.tolist() == [0.0, 4.0]
    assert torch.autograd.grad(g.sum(), a.values)[0].tolist() == [2.0, 2.0]


def test_dropout_zeroes_scales_and_masks_the_gradient():
    torch.manual_seed(0)
    n = 10_000
    a = SparseTensor(Pattern.banded(n, 0), torch.ones(n, requires_grad=True))
    dropped = a.dropout(0.2)
    assert dropped.pattern is a.pattern
    kept = dropped.values != 0
    assert set(dropped.values.tolist()) == {0.0, 1.25}
    assert abs(kept.float().mean().item() - 0.8) < 4 * (0.2 * 0.8 / n) ** 0.5
    (g,) = torch.autograd.grad((dropped.values**2).sum(), a.values, create_graph=True)
    torch.testing.assert_close(g, 2 * 1.25**2 * kept)
    torch.testing.assert_close(torch.autograd.grad((g**2).sum(), a.values)[0], 8 * 1.25**4 * kept)


def test_dropout_that_does_nothing_and_that_drops_all():
    a = matrix(2.0, 3.0)
    assert a.dropout(0.5, training=False) is a
    assert a.dropout(0.0).values.tolist() == [2.0, 3.0]
    assert a.dropout(1.0).values.tolist() == [0.0, 0.0]


def test_dropout_under_vmap_draws_as_randomness_says():
    drop = lambda v: SparseTensor._of(PATTERN, v).dropout(0.5).values  # noqa: E731
    drawn = vmap(drop, randomness="same")(torch.ones(20, 2))
    assert (drawn == drawn[0]).all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda a: a**0,
            ValueError,
            r"pow\(a, exponent\): exponent must be positive, got 0: .*a\.values\*\*0",
        ),
        (lambda a: a**-1.0, ValueError, r"exponent must be positive, got -1.0"),
        (lambda a: a ** float("nan"), ValueError, r"exponent must be positive, got nan"),
        (lambda a: a**a, TypeError, r"exponent must be a number, got SparseTensor"),
        (lambda a: a ** torch.tensor(2.0), TypeError, r"exponent must be a number, got Tensor"),
        (lambda a: a.dropout(1.5), ValueError, r"dropout\(a, p\): p must be from 0 to 1, got 1.5"),
        (lambda a: a.dropout(-0.1, training=False), ValueError, r"p must be from 0 to 1, got -0.1"),
        (
            lambda a: elementwise.pow(a.values, 2),
            TypeError,
            r"pow\(a, exponent\): a must be a SparseTensor, got Tensor",
        ),
        (
            lambda a: elementwise.dropout(a.values),
            TypeError,
            r"dropout\(a, p\): a must be a SparseTensor, got Tensor",
        ),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(matrix(1.0, 2.0))
