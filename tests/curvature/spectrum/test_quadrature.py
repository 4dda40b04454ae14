"""Gauss rules and traces of functions against the eigenvalues themselves."""

import pytest
import torch

from metagrad.curvature.spectrum.lanczos import lanczos
from metagrad.curvature.spectrum.quadrature import gauss_rule, trace_of
from tests.curvature.maps import SPECTRA, MatrixMap, basis, matrix, seeded

N = 300


def test_gauss_rules_are_exact_to_degree_2m_minus_1_and_not_beyond():
    for name, steps in [*((name, 5) for name in SPECTRA), ("flat", 1), ("flat", 2)]:
        dense = matrix(name, N) / SPECTRA[name](N).abs().max()
        start = torch.randn(1, N, dtype=torch.float64, generator=seeded())
        q = (start / start.norm()).squeeze(0)
        rule = gauss_rule(lanczos(MatrixMap(dense), start, steps=steps), 0)
        power = q
        for degree in range(2 * steps + 1):
            found, expected = (rule.weights * rule.nodes**degree).sum(), q @ power
            if degree < 2 * steps:
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
            elif name in ("flat", "indefinite"):
                assert abs(found - expected) > 1e-10
            power = dense @ power


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_traces_of_functions(dtype):
    operator = MatrixMap(matrix("flat", N).to(dtype))
    for function in (torch.exp, torch.log, torch.reciprocal):
        found = trace_of(operator, function, steps=30, probes=30, generator=seeded())
        expected = function(SPECTRA["flat"](N)).sum()
        assert found.value.dtype == found.stderr.dtype == dtype
        assert abs(found.value - expected) <= 4 * found.stderr
        assert found.stderr < 0.05 * expected.abs()
        assert (found.samples, found.matvecs, found.converged) == (30, 900, True)


@pytest.mark.parametrize("n", [1, 3])
def test_diagonal_operators_are_exact_with_signs(n):
    diagonal = torch.arange(1.0, n + 1, dtype=torch.float64)
    found = trace_of(MatrixMap(torch.diag(diagonal)), torch.log, generator=seeded())
    torch.testing.assert_close(found.value, diagonal.log().sum(), rtol=1e-13, atol=1e-13)
    assert found.stderr < 1e-13
    assert found.converged


def test_the_bytes_of_a_chunk_do_not_change_the_result():
    operator = MatrixMap(matrix("polynomial", N))
    one, some, default = (
        trace_of(operator, torch.exp, steps=12, probes=6, chunk=chunk, generator=seeded())
        for chunk in (1, 2 * 12 * N * 8, "64MiB")
    )
    for other in (one, some):
        torch.testing.assert_close(other.value, default.value, rtol=1e-12, atol=0)
        torch.testing.assert_close(other.stderr, default.stderr, rtol=1e-8, atol=0)


def test_a_tolerance_stops_early_and_says_when_it_was_not_reached():
    operator = MatrixMap(matrix("flat", N))
    loose = trace_of(operator, torch.exp, probes=1000, rtol=0.05, generator=seeded())
    low, high = loose.interval(0.95)
    assert loose.converged
    assert loose.samples < 100
    assert (high - low) / 2 <= 0.05 * loose.value
    assert trace_of(operator, torch.exp, rtol=1e-6, steps=5, generator=seeded()).samples == 256
    tight = trace_of(operator, torch.exp, probes=10, rtol=1e-6, generator=seeded())
    assert not tight.converged
    assert tight.samples == 10


@pytest.mark.parametrize("function", [torch.log, torch.sqrt])
@pytest.mark.parametrize("steps", [4, 12])
def test_too_few_steps_are_seen_and_widen_the_interval(steps, function):
    spectrum = torch.logspace(-6, 0, 100, dtype=torch.float64)
    q = basis(100)
    operator = MatrixMap((q * spectrum) @ q.t())
    few, all_steps = (
        trace_of(operator, function, steps=m, probes=8, generator=seeded()) for m in (steps, 100)
    )
    assert all_steps.converged
    from_steps = (few.stderr**2 - all_steps.stderr**2).clamp(min=0).sqrt()
    error = (few.value - all_steps.value).abs()  # of the steps: the probes are the same
    assert error < 2 * from_steps
    assert from_steps < (25 if steps == 6 else 10) * error


def test_the_derivative_is_the_trace_of_the_slope():
    q = basis(12)
    dense = (q * torch.linspace(1, 3, 12, dtype=torch.float64)) @ q.t()
    x = ((dense + dense.t()) / 2).requires_grad_()
    found = trace_of(MatrixMap(x), torch.log, steps=8, probes=600, generator=seeded())
    (gradient,) = torch.autograd.grad(found.value**2, x)
    expected = 2 * found.value.detach() * torch.linalg.inv(x.detach())
    error = (gradient + gradient.t()) / 2 - expected
    assert error.norm() < 0.2 * expected.norm()


def test_the_derivative_is_exact_where_probes_are():
    scale = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    found = trace_of(MatrixMap(torch.diag(scale)), torch.log, probes=2, generator=seeded())
    (gradient,) = torch.autograd.grad(found.value, scale, create_graph=True)
    torch.testing.assert_close(gradient, 1 / scale, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match=r"trace_of\(operator, function\): .* first derivatives only"):
        torch.autograd.grad(gradient.square().sum(), scale)


def test_functions_that_are_not_finite_or_not_elementwise():
    with pytest.raises(ValueError, match="function is not finite at -1, which is about an eigenvalue"):
        trace_of(MatrixMap(-torch.eye(4)), torch.log)
    with pytest.raises(ValueError, match="function: expected a tensor of the shape of its argument"):
        trace_of(MatrixMap(torch.eye(4)), torch.sum)


def test_traces_in_half_precision_are_float32():
    """Those above 65504 were infinite in float16, though no eigenvalue is."""
    found = trace_of(MatrixMap(torch.diag(torch.full((6,), 300.0)).half()), torch.square, steps=2)
    assert found.value.dtype == torch.float32
    torch.testing.assert_close(found.value, torch.tensor(6 * 300.0**2), rtol=2e-3, atol=0)
