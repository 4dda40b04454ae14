"""Lanczos against dense projections, at breakdowns, and in every magnitude."""

import pytest
import torch

from metagrad.curvature.spectrum.lanczos import lanczos
from tests.curvature.maps import SPECTRA, MatrixMap, matrix

N = 300


def starts(count: int, n: int = N, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, n, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def tridiagonal(state, i: int) -> torch.Tensor:
    size = state.sizes[i]
    return state.projected[i, :size, :size]


def test_bases_are_orthonormal_and_project_the_operator():
    for name, dtype in [*((name, torch.float64) for name in SPECTRA), ("indefinite", torch.float32)]:
        operator = MatrixMap(matrix(name, N).to(dtype))
        state = lanczos(operator, starts(3, dtype=dtype), steps=40)
        eps, norm = torch.finfo(dtype).eps, float(SPECTRA[name](N).abs().max())
        for i, size in enumerate(state.sizes):
            rows = state.basis[i, :size]
            identity = torch.eye(size, dtype=dtype)
            torch.testing.assert_close(rows @ rows.t(), identity, rtol=0, atol=50 * eps)
            projected = (rows @ operator.matrix @ rows.t()).double()
            torch.testing.assert_close(projected, tridiagonal(state, i), rtol=0, atol=100 * eps * norm)
        torch.testing.assert_close(
            state.first, state.basis[:, 0] @ operator.matrix, rtol=0, atol=20 * eps * norm
        )
        assert state.matvecs == len(state.sizes) * max(state.sizes) == operator.matvecs


def test_each_start_has_its_own_process():
    operator, vectors = MatrixMap(matrix("indefinite", N)), starts(3)
    together = lanczos(operator, vectors, steps=12)
    for i in range(3):
        alone = lanczos(operator, vectors[i : i + 1], steps=12)
        torch.testing.assert_close(together.projected[i], alone.projected[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(together.basis[i], alone.basis[0], rtol=0, atol=1e-9)


def test_a_process_ends_in_an_invariant_space_and_the_others_go_on():
    """A product with a diagonal matrix has exact zeros outside the invariant space."""
    spectrum, q = SPECTRA["indefinite"](N), torch.eye(N, dtype=torch.float64)
    operator = MatrixMap(torch.diag(spectrum))
    state = lanczos(operator, torch.stack([q[0], q[0] + 2 * q[5] + q[9], starts(1)[0]]), steps=8)
    assert state.sizes == [1, 3, 8]
    assert operator.matvecs == state.matvecs == 24  # an ended process multiplies zeros
    values = torch.linalg.eigvalsh(tridiagonal(state, 1))
    torch.testing.assert_close(values, spectrum[[9, 5, 0]], rtol=1e-12, atol=0)
    assert not state.basis[0, 1:].any()
    assert not state.projected[0, 1:].any()


def test_tiny_operators_and_more_steps_than_rows():
    for n in [1, 2]:
        dense = torch.tensor([[2.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:n, :n]
        state = lanczos(MatrixMap(dense), starts(1, n), steps=10)
        assert state.sizes == [n]
        values = torch.linalg.eigvalsh(tridiagonal(state, 0))
        torch.testing.assert_close(values, torch.linalg.eigvalsh(dense), rtol=1e-12, atol=0)


def test_squares_neither_overflow_nor_vanish():
    for magnitude in [1e-30, 1e30]:
        plain = lanczos(MatrixMap(matrix("flat", N).float()), starts(1, dtype=torch.float32), steps=5)
        scaled = lanczos(
            MatrixMap((magnitude * matrix("flat", N)).float()), starts(1, dtype=torch.float32) * 1e30, steps=5
        )
        assert scaled.sizes == [5]
        torch.testing.assert_close(scaled.projected / magnitude, plain.projected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("magnitude", [1e-200, 1e200])
def test_squares_of_doubles_neither_overflow_nor_vanish(magnitude):
    plain, scaled = (lanczos(MatrixMap(c * matrix("flat", N)), starts(1), steps=5) for c in (1.0, magnitude))
    assert scaled.sizes == [5]
    torch.testing.assert_close(scaled.projected / magnitude, plain.projected, rtol=1e-9, atol=1e-12)


def test_operators_that_are_not_symmetric_are_seen():
    for dtype, size in [(torch.float64, 0.1), (torch.float32, 1.0)]:
        dense = matrix("flat", 50).to(dtype)
        skew = torch.randn(50, 50, dtype=dtype, generator=torch.Generator().manual_seed(1)) / 50**0.5
        with pytest.raises(ValueError, match=r"is not symmetric: .* differ by .* of its norm"):
            lanczos(MatrixMap(dense + size * (skew - skew.t())), starts(1, 50, dtype), steps=10)
