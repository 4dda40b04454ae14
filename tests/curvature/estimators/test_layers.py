from __future__ import annotations

import pytest
import torch

import metagrad as mg
from metagrad.curvature.estimators.norms import layer_traces
from metagrad.curvature.estimators.trace import trace
from tests.curvature.maps import MatrixMap, matrix

BLOCKS = {"body": slice(0, 40), "head": slice(40, 100), "all": slice(None), "body.bias": slice(30, 40)}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("distribution", ["rademacher", "normal", "sphere"])
def test_each_block_has_its_trace(distribution):
    A = matrix("step", 100)
    operator = MatrixMap(A)
    found = layer_traces(operator, BLOCKS, probes=3000, distribution=distribution, generator=seeded())
    assert list(found) == list(BLOCKS)
    assert operator.matvecs == 3000
    for name, span in BLOCKS.items():
        estimate, expected = found[name], A[span, span].trace()
        assert (estimate.value - expected).abs() < 3 * estimate.stderr
        assert estimate.stderr < 0.03 * A.trace()
        assert (estimate.samples, estimate.matvecs, estimate.method) == (3000, 3000, "hutchinson")
        assert repr(estimate).startswith(f"trace of {name} = ")


def test_the_block_of_everything_is_hutchinsons_trace():
    operator = MatrixMap(matrix("indefinite", 100))
    found = layer_traces(operator, {"all": slice(None)}, probes=20, generator=seeded())["all"]
    whole = trace(operator, method="hutchinson", probes=20, generator=seeded())
    torch.testing.assert_close(found.value, whole.value, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.stderr, whole.stderr, rtol=1e-12, atol=0)


def test_signs_are_exact_on_diagonal_matrices_and_known_to_be():
    values = torch.arange(1.0, 101.0)
    for name, estimate in layer_traces(MatrixMap(torch.diag(values)), BLOCKS, probes=4).items():
        assert estimate.value == values[BLOCKS[name]].sum()
        assert 0 < estimate.stderr < 1e-6 * values.sum()


def test_intervals_cover():
    A = matrix("polynomial", 200)
    spans = {f"layer {k}": slice(40 * k, 40 * k + 40) for k in range(5)}
    held = []
    for seed in range(100):
        for name, estimate in layer_traces(MatrixMap(A), spans, generator=seeded(seed)).items():
            low, high = estimate.interval(0.9)
            held.append(low <= A[spans[name], spans[name]].trace() <= high)
    assert 0.85 <= sum(held) / len(held) <= 0.99


def test_estimates_do_not_depend_on_chunks():
    operator = MatrixMap(matrix("polynomial", 100))
    whole, parts = (
        layer_traces(operator, BLOCKS, probes=20, generator=seeded(), chunk=chunk) for chunk in (1e6, 2400)
    )
    for name in BLOCKS:
        torch.testing.assert_close(whole[name].value, parts[name].value, rtol=1e-12, atol=1e-14)


def test_differentiable_as_the_products_are():
    root = torch.randn(6, 6, dtype=torch.float64, generator=seeded(1)).requires_grad_()

    def values(root):
        found = layer_traces(
            MatrixMap(root @ root.t()), {"a": slice(0, 2), "b": slice(2, 6)}, probes=3, generator=seeded()
        )
        return found["a"].value, found["b"].value

    assert mg.gradcheck(values, (root,), order=2, directions=2)


def test_bad_blocks():
    operator = MatrixMap(torch.eye(5))
    with pytest.raises(
        ValueError, match=r"layer_traces\(operator, blocks\): expected at least one block, got none"
    ):
        layer_traces(operator, {})
    with pytest.raises(TypeError, match=r"blocks\['head'\] must be a slice, got int"):
        layer_traces(operator, {"head": 3})  # type: ignore[dict-item]
    for block in (slice(2, 7), slice(3, 3), slice(-2, None), slice(0, 4, 2)):
        with pytest.raises(
            ValueError,
            match=r"blocks\['head'\] must be a slice with 0 <= start < stop <= 5 and no step, got slice",
        ):
            layer_traces(operator, {"body": slice(0, 2), "head": block})
    with pytest.raises(ValueError, match="probes must be at least 1, got 0"):
        layer_traces(operator, BLOCKS, probes=0)
    with pytest.raises(ValueError, match="a product of the operator has NaN or inf"):
        layer_traces(MatrixMap(torch.full((5, 5), torch.nan)), {"all": slice(0, 5)})
