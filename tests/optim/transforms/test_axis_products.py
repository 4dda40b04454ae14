"""Products along axes, against the Kronecker product of the matrices."""

import functools

import pytest
import torch

from metagrad.core._torch import pytree
from metagrad.optim.rules import axis_products, with_batch_ndim
from tests.joint import joint_gradcheck
from tests.optim.cases import draw

SHAPES = {"conv": (3, 2, 2, 2), "w": (3, 2), "b": (4,), "scale": ()}
SIZES = {"conv": (3, 2, 4), "w": (3, 2), "b": (4,), "scale": (1,)}


def matrices(dtype=torch.float64, seed=5):
    drawn = draw({f"{key} {i}": (n, n) for key, ns in SIZES.items() for i, n in enumerate(ns)}, dtype, seed)
    return {key: tuple(drawn[f"{key} {i}"] for i in range(len(ns))) for key, ns in SIZES.items()}


def transformed(transform, grads):
    return transform.transform(grads, transform.init(grads), grads)[0]


def test_it_is_the_kronecker_product():
    grads, given = draw(SHAPES), matrices()
    got = transformed(axis_products(given), grads)
    for key, g in grads.items():
        expected = functools.reduce(torch.kron, given[key]) @ g.flatten()
        torch.testing.assert_close(got[key], expected.reshape(g.shape), rtol=1e-12, atol=1e-12)


def test_vectors_are_diagonals_and_none_is_the_identity():
    grads = draw(SHAPES)
    diagonals = {key: tuple(m.diagonal() for m in ms) for key, ms in matrices().items()}
    full = {key: tuple(m.diagonal().diag() for m in ms) for key, ms in matrices().items()}
    identity = {key: (None,) * len(ms) for key, ms in full.items()}
    for psd in (False, True):
        torch.testing.assert_close(
            transformed(axis_products(diagonals, psd=psd), grads),
            transformed(axis_products(full, psd=psd), grads),
        )
    for none in (identity, dict.fromkeys(SHAPES, ())):
        torch.testing.assert_close(transformed(axis_products(none), grads), grads, rtol=0, atol=0)


def test_psd_is_the_gram_matrix():
    grads, given = draw(SHAPES), matrices()
    grams = {key: tuple(m.mT @ m for m in ms) for key, ms in given.items()}
    torch.testing.assert_close(
        transformed(axis_products(given, psd=True), grads), transformed(axis_products(grams), grads)
    )


@pytest.mark.parametrize("psd", [False, True])
def test_gradcheck_in_gradients_and_matrices(psd):
    def fn(given, grads):
        return transformed(axis_products(given, psd=psd), grads)

    inputs = pytree.tree_map(
        lambda leaf: leaf.requires_grad_(), ({**matrices(), "b": (draw(SHAPES)["b"],)}, draw(SHAPES))
    )
    assert joint_gradcheck(fn, inputs, order=3, directions=1, rtol=1e-4)


def test_stacked_tasks_equal_one_task_after_the_other():
    grads, given = draw(SHAPES, tasks=(3,)), {**matrices(), "b": (draw(SHAPES)["b"],)}
    together = transformed(with_batch_ndim(axis_products(given), 1), grads)
    alone = [transformed(axis_products(given), {key: g[i] for key, g in grads.items()}) for i in range(3)]
    torch.testing.assert_close(together, {key: torch.stack([one[key] for one in alone]) for key in grads})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3.0, TypeError, r"expected a dict by parameter name, got 'float'"),
        ({"w": torch.eye(2)}, TypeError, r"matrices\['w'\] must be a tuple of tensors or None, .* got Tensor"),
        ({"w": (1.0,)}, TypeError, r"matrices\['w'\] must be a tuple of tensors or None, .* got \(1.0,\)"),
        ({"v": ()}, ValueError, r"one entry for each parameter by name; unknown: \['v'\], missing: \['w'\]"),
        ({"w": (None,) * 3}, ValueError, "'w': expected at most 2 matrices, got 3"),
        ({"w": (None, torch.eye(3))}, ValueError, r"'w', axis 1, must be \[2, 2\], or .* got \[3, 3"),
    ],
)  # fmt: skip
def test_matrices_that_do_not_fit_are_refused(given, error, message):
    with pytest.raises(error, match=rf"axis_products\(matrices\).*{message}"):
        transformed(axis_products(given), {"w": torch.ones(3, 2)})
