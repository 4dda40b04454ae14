"""Gauss rules, traces of functions and log-determinants against eigenvalues, and their first derivatives."""

import pytest
import torch

from metagrad.curvature.solvers.implicit import first_order
from metagrad.curvature.spectrum.lanczos import lanczos
from metagrad.curvature.spectrum.quadrature import gauss_rule, log_determinant, trace_of
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


def test_the_second_derivative_is_refused():
    x = torch.tensor(2.0, requires_grad=True)
    for linear in (False, True):
        y = first_order(3 * x if linear else x**3, "f(x)")
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        assert float(gradient.detach()) == (3 if linear else 12)
        with pytest.raises(RuntimeError, match=r"f\(x\): the result has first derivatives only"):
            torch.autograd.grad(gradient, x)


def test_under_vmap_and_forward_mode():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    gradients = torch.func.vmap(torch.func.grad(lambda x: first_order(x**2, "f(x)")))(x)
    torch.testing.assert_close(gradients, 2 * x.detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        tangent = torch.autograd.forward_ad.unpack_dual(first_order(dual**2, "f(x)")).tangent
    torch.testing.assert_close(tangent, 2 * x.detach(), check_stride=False)


def test_a_damped_low_rank_operator():
    operator = MatrixMap(matrix("exponential", N))
    found = log_determinant(operator, damping=1e-2, probes=30, generator=seeded())
    expected = (SPECTRA["exponential"](N) + 1e-2).log().sum()
    assert abs(found.value - expected) <= 4 * found.stderr
    assert found.converged
    assert repr(found).startswith("log-determinant = ")


def test_damping_is_a_shift_of_the_operator():
    dense = matrix("flat", N)
    inside = log_determinant(MatrixMap(dense + 0.5 * torch.eye(N)), generator=seeded())
    outside = log_determinant(MatrixMap(dense), damping=0.5, generator=seeded())
    torch.testing.assert_close(inside.value, outside.value, rtol=1e-10, atol=0)


def test_the_derivative_is_that_of_the_dense_log_determinant():
    scale = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64, requires_grad=True)
    found = log_determinant(MatrixMap(torch.diag(scale)), damping=1.0, probes=2, generator=seeded())
    (gradient,) = torch.autograd.grad(found.value**3, scale)
    torch.testing.assert_close(
        gradient, 3 * found.value.detach() ** 2 / (scale.detach() + 1), rtol=1e-12, atol=0
    )


def test_an_indefinite_operator_is_refused_with_the_damping_that_helps():
    operator = MatrixMap(matrix("indefinite", N))
    with pytest.raises(ValueError, match=r"positive definite: .* -10 or less\. .* damping=2e\+01"):
        log_determinant(operator, generator=seeded())
    assert log_determinant(operator, damping=20.0, generator=seeded()).value > 0
    with pytest.raises(ValueError, match=r"an eigenvalue of -9 or less\. .* damping=2e\+01 or more"):
        log_determinant(operator, damping=1.0, generator=seeded())


def test_a_singular_operator_is_refused():
    for dtype in [torch.float64, torch.float32]:
        low_rank = basis(N)[:5].t() @ basis(N)[:5]
        for dense in (low_rank, torch.diag(torch.tensor([1.0, 2.0, 0.0]).double())):
            with pytest.raises(ValueError, match="the operator is not positive definite"):
                log_determinant(MatrixMap(dense.to(dtype)), generator=seeded())
        with pytest.raises(ValueError, match="an eigenvalue of 0 or less"):
            log_determinant(MatrixMap(torch.zeros(3, 3, dtype=dtype)), generator=seeded())
