"""The Nystrom approximation, as an inverse and as a preconditioner."""

import pytest
import torch

from metagrad.curvature.solvers.nystrom import nystrom
from metagrad.curvature.solvers.solution import Result
from metagrad.curvature.solvers.solve import solve
from tests.curvature.maps import MatrixMap, drawn, matrix, seeded


def of_rank(n: int, rank: int) -> torch.Tensor:
    factor = drawn(n, rank)
    return factor @ factor.t()


def products(found, v):
    return (v @ found.basis.t() * found.eigenvalues) @ found.basis


def test_it_is_exact_for_an_operator_of_its_rank():
    for rank in [5, 8, 20]:
        A = of_rank(20, 5)
        operator = MatrixMap(A)
        found = nystrom(operator, rank, generator=seeded())
        assert found.matvecs == operator.matvecs == rank
        v = drawn(3, 20)
        torch.testing.assert_close(products(found, v), v @ A, rtol=1e-9, atol=1e-9)
        expected = torch.linalg.eigvalsh(A).flip(0)[:5]
        torch.testing.assert_close(found.eigenvalues[:5], expected, rtol=1e-9, atol=0)
        assert not found.eigenvalues[5:].any()
        eye = torch.eye(rank, dtype=A.dtype)
        torch.testing.assert_close(found.basis @ found.basis.t(), eye, rtol=0, atol=1e-10)


def test_it_is_below_the_operator_and_close_to_the_best_of_its_rank():
    A = matrix("exponential", 100)
    found = nystrom(MatrixMap(A), 30, generator=seeded())
    error = A - products(found, torch.eye(100).double())
    assert torch.linalg.eigvalsh(error).min() > -1e-12
    assert torch.linalg.matrix_norm(error, 2) < 1000 * 0.7**30  # the best has 0.7^30


def test_the_inverse_is_that_of_the_approximation():
    A, v = of_rank(20, 5), drawn(3, 20)
    found = nystrom(MatrixMap(A), 8, generator=seeded())
    expected = torch.linalg.solve(A + 0.1 * torch.eye(20), v.t()).t()
    torch.testing.assert_close(found.inverse(0.1)(v), expected, rtol=1e-6, atol=1e-6)


def test_the_inverse_of_full_rank_has_the_rounding_errors_of_its_matrix():
    """Not those of the vector over the damping: (v - U U^T v) / damping was nothing else."""
    diagonal = torch.arange(1.0, 9.0)
    found = nystrom(MatrixMap(diagonal.diag()), 8, generator=seeded())
    torch.testing.assert_close(found.inverse(1e-12)(torch.ones(1, 8))[0], 1 / diagonal, rtol=1e-4, atol=0)


def test_the_inverse_is_differentiable_in_the_damping():
    found = nystrom(MatrixMap(of_rank(20, 5)), 8, generator=seeded())
    v, damping = drawn(1, 20), torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((found.inverse(damping)(v) * v).sum(), damping)
    x = found.inverse(0.1)(v)
    torch.testing.assert_close(gradient, -(x * x).sum(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_the_preconditioner_has_the_formula(damping):
    A = matrix("exponential", 40)
    found = nystrom(MatrixMap(A), 10, generator=seeded())
    U, eigenvalues = found.basis.t(), found.eigenvalues
    top = (eigenvalues[-1] + damping) * (U / (eigenvalues + damping)) @ U.t()
    expected = top + torch.eye(40).double() - U @ U.t()
    torch.testing.assert_close(found.preconditioner(damping)(torch.eye(40).double()), expected)


def test_without_damping_the_null_space_is_left_alone():
    found = nystrom(MatrixMap(of_rank(20, 5)), 8, generator=seeded())
    images = found.preconditioner()(found.basis[5:])
    torch.testing.assert_close(images, found.basis[5:])


def test_an_ill_conditioned_system_needs_far_fewer_steps():
    A, b = matrix("exponential", 300), drawn(300)
    for damping in (1e-4, 1e-7):
        plain = solve(MatrixMap(A), b, damping=damping, rtol=1e-8, max_steps=3000)
        found = nystrom(MatrixMap(A), damping=damping, generator=seeded()).preconditioner(damping)
        better = solve(MatrixMap(A), b, damping=damping, rtol=1e-8, preconditioner=found)
        assert better.result is Result.CONVERGED
        assert 3 * int(better.stats.steps) < int(plain.stats.steps)
        expected = torch.linalg.solve(A + damping * torch.eye(300), b)
        torch.testing.assert_close(better.value, expected, rtol=1e-5, atol=1e-5 * float(expected.norm()))


def test_the_rank_follows_the_damping():
    A = matrix("exponential", 200)
    ranks = [nystrom(MatrixMap(A), damping=d, generator=seeded()).matvecs for d in (1.0, 1e-2, 1e-4, 1e-12)]
    assert ranks == [8, 8, 32, 128]
    assert nystrom(MatrixMap(matrix("flat", 300)), generator=seeded()).matvecs == 256
    assert nystrom(MatrixMap(matrix("flat", 20)), generator=seeded()).matvecs == 20


def test_the_zero_operator_has_no_eigenvalues():
    found = nystrom(MatrixMap(torch.zeros(5, 5)), 2, generator=seeded())
    assert not found.eigenvalues.any()
    torch.testing.assert_close(found.inverse(2.0)(torch.ones(1, 5)), torch.full((1, 5), 0.5))


def test_operators_are_checked():
    with pytest.raises(ValueError, match="not positive semi-definite"):
        nystrom(MatrixMap(-torch.eye(3)), 2)
