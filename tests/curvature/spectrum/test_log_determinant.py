"""Log-determinants against dense ones, their derivatives, and errors."""

import pytest
import torch

from metagrad.curvature.spectrum.log_determinant import log_determinant
from tests.curvature.maps import SPECTRA, MatrixMap, basis, matrix, seeded

N = 300


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
    with pytest.raises(
        ValueError, match=r"not positive definite: .* -10 or less\. .* damping=2e\+01 or more"
    ):
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
