"""MINRES on indefinite, singular and inconsistent systems."""

from __future__ import annotations

import pytest
import torch

from metagrad.curvature.solvers.minres import MINRES
from metagrad.curvature.solvers.solution import Result
from metagrad.curvature.solvers.solve import solve
from tests.curvature.maps import MatrixMap, basis, matrix


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(eigenvalues: torch.Tensor) -> torch.Tensor:
    q = basis(len(eigenvalues))
    dense = (q * eigenvalues.double()) @ q.t()
    return (dense + dense.t()) / 2


def test_an_indefinite_system_is_solved():
    A = with_spectrum(torch.cat([torch.linspace(-3, -1, 10), torch.linspace(1, 4, 20)]))
    b = random(30)
    solution = solve(MatrixMap(A), b, method="minres", rtol=1e-10)
    assert solution.result is Result.CONVERGED
    torch.testing.assert_close(solution.value, torch.linalg.solve(A, b), rtol=1e-8, atol=1e-9)
    assert solve(MatrixMap(A), b, method="cg").result is Result.NEGATIVE_CURVATURE


def test_it_ends_after_as_many_steps_as_there_are_distinct_eigenvalues():
    for distinct in ([2.0], [-1.0, 5.0], [-1.0, 2.0, 9.0]):
        A = with_spectrum(torch.tensor(distinct * 6))
        solution = solve(MatrixMap(A), random(len(A)), method="minres", rtol=1e-9)
        assert solution.result is Result.CONVERGED
        assert int(solution.stats.steps) == len(distinct)


def test_every_iterate_has_the_least_residual_of_its_krylov_space():
    A, b = matrix("indefinite", 40), random(40)
    columns = [b]
    for steps in range(1, 7):
        x = solve(MatrixMap(A), b, method="minres", rtol=0.0, max_steps=steps).value
        krylov = torch.linalg.qr(torch.stack([c / c.norm() for c in columns], dim=1))[0]
        best = krylov @ torch.linalg.lstsq(A @ krylov, b).solution
        torch.testing.assert_close(x, best, rtol=1e-6, atol=1e-9)
        columns.append(A @ columns[-1])


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_the_iterates_are_those_of_scipy(steps, start):
    linalg = pytest.importorskip("scipy.sparse.linalg")
    A, b = matrix("indefinite", 101), random(101)
    x0 = random(101, seed=1) if start else torch.zeros(101).double()
    expected, _ = linalg.minres(A.numpy(), b.numpy(), x0.numpy(), rtol=0.0, maxiter=steps)
    solution = solve(MatrixMap(A), b, method="minres", x0=x0 if start else None, rtol=0.0, max_steps=steps)
    assert int(solution.stats.steps) == steps
    torch.testing.assert_close(solution.value, torch.from_numpy(expected), rtol=1e-7, atol=1e-9)


def test_a_singular_system_with_a_solution_gives_one():
    A = with_spectrum(torch.cat([torch.zeros(5), torch.linspace(-2, -1, 5), torch.linspace(1, 3, 10)]))
    b = A @ random(20)
    solution = solve(MatrixMap(A), b, method="minres", rtol=1e-10)
    assert solution.result is Result.CONVERGED
    # From 0, the iterates stay in the range: it is the solution of least norm.
    torch.testing.assert_close(solution.value, torch.linalg.pinv(A, rtol=1e-10) @ b, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_inconsistent_system_ends_with_the_least_residual(dtype):
    A = with_spectrum(torch.cat([torch.zeros(5), torch.linspace(-2, -1, 5), torch.linspace(1, 3, 10)]))
    b = random(20)
    solution = solve(
        MatrixMap(A.to(dtype)), b.to(dtype), method="minres", rtol=1e-8 if dtype == torch.float64 else 1e-5
    )
    assert solution.result is Result.INCONSISTENT
    best = torch.linalg.pinv(A, rtol=1e-10) @ b
    expected = (b - A @ best).norm()
    torch.testing.assert_close(solution.stats.residual_norms.double(), expected, rtol=1e-5, atol=1e-6)
    assert int(solution.stats.steps) < 20
    assert solution.value.norm() < 10


def test_what_counts_as_singular_is_an_option():
    A = torch.diag(torch.tensor([1.0, 1e-3, 1e-9], dtype=torch.float64))
    b = torch.ones(3, dtype=torch.float64)
    assert solve(MatrixMap(A), b, method="minres").result is Result.INCONSISTENT
    solution = solve(MatrixMap(A), b, method=MINRES(singular=0.0))
    assert solution.result is Result.CONVERGED
    torch.testing.assert_close(solution.value, 1 / A.diagonal(), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"MINRES\(singular\): expected 0 or more, or None, got -1"):
        MINRES(singular=-1.0)


def test_zero_and_one():
    operator = MatrixMap(-2 * torch.eye(1))
    assert solve(operator, torch.ones(1), method="minres").value.item() == -0.5
    zero = solve(operator, torch.zeros(1), method="minres")
    assert zero.result is Result.CONVERGED
    assert int(zero.stats.steps) == 0


def test_the_zero_operator_is_inconsistent():
    solution = solve(MatrixMap(torch.zeros(3, 3)), torch.ones(3), method="minres")
    assert solution.result is Result.INCONSISTENT
    assert torch.equal(solution.value, torch.zeros(3))


def test_a_preconditioner_saves_steps():
    scale = torch.logspace(0, 4, 60, dtype=torch.float64)
    signs = torch.where(torch.arange(60) % 3 == 0, -1.0, 1.0)
    A = torch.diag(scale * signs) + 0.1 * matrix("flat", 60)
    b = random(60)
    plain = solve(MatrixMap(A), b, method="minres", rtol=1e-8, max_steps=1000)
    better = solve(MatrixMap(A), b, method=MINRES(), rtol=1e-8, preconditioner=lambda rows: rows / scale)
    assert better.result is Result.CONVERGED
    torch.testing.assert_close(better.value, torch.linalg.solve(A, b), rtol=1e-5, atol=1e-8)
    assert 4 * int(better.stats.steps) < int(plain.stats.steps)


def test_an_indefinite_preconditioner_is_told():
    A = with_spectrum(torch.linspace(1, 2, 10))
    signs = torch.where(torch.arange(10) < 5, -1.0, 1.0).double()
    solution = solve(MatrixMap(A), random(10), method="minres", preconditioner=lambda rows: rows * signs)
    assert solution.result is Result.BREAKDOWN


def test_rows_end_on_their_own_and_start_where_they_are_told():
    A = with_spectrum(torch.cat([torch.linspace(-3, -1, 10), torch.linspace(1, 4, 31)]))
    b = random(3, 41)
    b[1] = 0
    x0 = random(3, 41, seed=1)
    x0[2] = torch.linalg.solve(A, b[2])
    together = solve(MatrixMap(A), b, method="minres", x0=x0, rtol=1e-8, max_steps=200)
    for row in range(3):
        alone = solve(MatrixMap(A), b[row], method="minres", x0=x0[row], rtol=1e-8, max_steps=200)
        torch.testing.assert_close(together.value[row], alone.value, rtol=1e-6, atol=1e-6)
        assert abs(int(together.stats.steps[row]) - int(alone.stats.steps)) <= 1
    assert int(together.stats.steps[2]) == 0
