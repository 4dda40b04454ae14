"""Invariants of every operation in ``cases.py``, against the dense oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.func import grad, jvp, vmap

import metagrad as mg
from metagrad.sparse import Pattern, SparseTensor
from tests.sparse.cases import CASES, Case, arguments
from tests.sparse.guards import no_large_outputs
from tests.sparse.strategies import patterns, seeds

every_case = pytest.mark.parametrize("case", CASES, ids=str)
# One case of each kind, for invariants that do not depend on the derivative.
KINDS = {
    "a @ x",
    "x @ a",
    "a * b, two patterns",
    "row * a",
    "sum of rows",
    "softmax of rows",
    "norm",
    "to_dense",
}
kinds = pytest.mark.parametrize("case", [case for case in CASES if str(case) in KINDS], ids=str)

SMALL = Pattern(torch.tensor([0, 0, 1, 3, 3, 3]), torch.tensor([1, 3, 0, 0, 1, 4]), (4, 5))


def tensors(args):
    return [arg.values if isinstance(arg, SparseTensor) else arg for arg in args]


def rebuilt(args, leaves):
    return [
        SparseTensor._of(arg.pattern, leaf) if isinstance(arg, SparseTensor) else leaf
        for arg, leaf in zip(args, leaves, strict=True)
    ]


def dense(x: SparseTensor | Tensor) -> Tensor:
    return x.to_dense() if isinstance(x, SparseTensor) else x


def stored(x: SparseTensor | Tensor) -> Tensor:
    return x.values if isinstance(x, SparseTensor) else x


def contracted(x: Tensor) -> Tensor:
    """Return a scalar of all elements with nonzero third derivatives."""
    weights = torch.cos(torch.arange(x.numel(), dtype=torch.float64)).to(x.dtype).reshape(x.shape)
    return (weights * (x + x**2 / 2 + x**3 / 6)).sum()


def derivatives(function, leaves, order: int):
    """Return gradients of a scalar, of the contraction of the gradients, and so on, in all mixed orders."""
    loss, found = contracted(function(leaves)), []
    for _ in range(order):
        grads = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        found.append([g.detach() for g in grads])
        loss = loss + sum(contracted(g) for g in grads)
    return found


def oracle(case: Case, args):
    mask = args[0].with_values(torch.ones_like(args[0].values)).to_dense() != 0
    return lambda leaves: case.dense(mask, *map(dense, rebuilt(args, leaves)))


def check_against_dense(case: Case, args):
    leaves, reference = tensors(args), oracle(case, args)
    torch.testing.assert_close(dense(case.sparse(*args)), reference(leaves), equal_nan=True)
    got = derivatives(lambda leaves: dense(case.sparse(*rebuilt(args, leaves))), leaves, 3)
    expected = derivatives(reference, leaves, 3)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9, equal_nan=True)


@every_case
@settings(max_examples=4, deadline=None)
@given(pattern=patterns(), seed=seeds)
def test_every_derivative_is_that_of_the_dense_operation(case, pattern, seed):
    check_against_dense(case, arguments(case, pattern, seed=seed))


@every_case
def test_func_transforms_agree_with_the_tape(case):
    args = arguments(case, SMALL)
    leaves = tuple(tensors(args))

    def loss(leaves):
        return contracted(stored(case.sparse(*rebuilt(args, leaves))))

    tangents = tuple(torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape) for x in leaves)
    gradients = torch.autograd.grad(loss(leaves), leaves, create_graph=True)
    slope = sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))
    slope = slope + 0 * leaves[0].sum()  # a step function has slope 0 and no graph
    product = torch.autograd.grad(slope, leaves, materialize_grads=True)
    constants = tuple(x.detach() for x in leaves)
    torch.testing.assert_close(grad(loss)(constants), gradients)
    torch.testing.assert_close(jvp(loss, (constants,), (tangents,))[1], slope)
    torch.testing.assert_close(jvp(grad(loss), (constants,), (tangents,))[1], product)
    torch.testing.assert_close(grad(lambda x: jvp(loss, (x,), (tangents,))[1])(constants), product)
    curvature = sum((p * t).sum() for p, t in zip(product, tangents, strict=True))
    torch.testing.assert_close(
        jvp(lambda x: jvp(loss, (x,), (tangents,))[1], (constants,), (tangents,))[1], curvature
    )


@every_case
def test_vmap_is_a_loop(case):
    args = arguments(case, SMALL)
    examples = [tuple(factor * x.detach() for x in tensors(args)) for factor in (1.0, 0.9)]
    stacked = tuple(torch.stack(xs) for xs in zip(*examples, strict=True))

    def values(*leaves):
        return stored(case.sparse(*rebuilt(args, leaves)))

    def gradient(*leaves):
        return grad(lambda leaves: contracted(values(*leaves)))(leaves)

    torch.testing.assert_close(vmap(values)(*stacked), torch.stack([values(*x) for x in examples]))
    expected = tuple(torch.stack(g) for g in zip(*(gradient(*x) for x in examples), strict=True))
    torch.testing.assert_close(vmap(gradient)(*stacked), expected)


@kinds
def test_an_unroll_on_sparse_state_has_one_gradient_in_every_memory_mode(case):
    args = arguments(case, SMALL)

    def step(a, t, *operands):
        loss = contracted(stored(case.sparse(a, *operands)))
        gradient = mg.grad(loss, a, create_graph=True, materialize_grads=True)
        return a - 1e-3 * gradient, loss

    def meta_gradient(memory):
        last, losses = mg.unroll(step, args[0], *args[1:], steps=2, memory=memory)
        assert last.pattern is args[0].pattern
        return mg.grad(contracted(last.values) + losses.sum(), args, materialize_grads=True)

    full, recomputed = meta_gradient("full"), meta_gradient("step")
    torch.testing.assert_close(tensors(recomputed), tensors(full))


@kinds
def test_gradients_keep_the_pattern_of_what_they_are_of(case):
    args = arguments(case, SMALL)
    first = mg.grad(contracted(stored(case.sparse(*args))), args, create_graph=True, materialize_grads=True)
    slope = sum(contracted(stored(g)) for g in first)
    for gradients in (first, mg.grad(slope, args, materialize_grads=True) if slope.requires_grad else first):
        for gradient, arg in zip(gradients, args, strict=True):
            assert not isinstance(arg, SparseTensor) or gradient.pattern is arg.pattern


def large_pattern(n: int = 3000, entries: int = 5000) -> Pattern:
    generator = torch.Generator().manual_seed(0)
    row, col = torch.randint(0, n, (2, entries), generator=generator)
    return Pattern.coalesce(row, col, (n, n))[0]


LARGE = large_pattern()


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_dense], ids=str)
def test_nothing_is_as_large_as_the_matrix_at_any_order(case):
    args = arguments(case, LARGE)
    with no_large_outputs(4 * (LARGE.nnz + sum(LARGE.shape))):
        derivatives(lambda leaves: stored(case.sparse(*rebuilt(args, leaves))), tensors(args), 3)


@kinds
def test_float32_agrees_and_stays_float32(case):
    args = arguments(case, SMALL, dtype=torch.float32)
    result = dense(case.sparse(*args))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, oracle(case, args)(tensors(args)))
