import pytest
import torch

from metagrad.curvature.estimators.basis import Basis, inverse_rows, left_out


def vectors(count, n=12, seed=0):
    return torch.randn(count, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def orthonormal(basis):
    torch.testing.assert_close(
        basis.rows @ basis.rows.t(), torch.eye(len(basis.rows), dtype=basis.rows.dtype), rtol=0, atol=1e-13
    )


def test_what_was_appended_is_lower_times_rows():
    for counts in [[7], [3, 4], [1, 1, 5], [4, 8]]:
        given = vectors(sum(counts))
        basis = Basis(given.new_zeros(0, 12))
        for part in given.split(counts):
            before = basis.rows
            new = basis.append(part, "f()")
            assert torch.equal(basis.rows, torch.cat([before, new]))
        orthonormal(basis)
        torch.testing.assert_close(basis.lower @ basis.rows, given)
        assert torch.equal(basis.lower, basis.lower.tril())


def test_signs_of_a_factorisation_do_not_matter():
    """LAPACK returns its own rows with a plus sign. Other libraries may not."""
    given = vectors(7)
    basis = Basis(given.new_zeros(0, 12))
    basis.append(given[:4], "f()")
    basis.rows, basis.lower = -basis.rows, -basis.lower
    basis.append(given[4:], "f()")
    torch.testing.assert_close(basis.lower @ basis.rows, given)


@pytest.mark.parametrize("scale", [0.0, 1e-17])
def test_dependent_vectors_leave_it_orthonormal(scale):
    first = torch.eye(12, dtype=torch.float64)[:2]
    basis = Basis(first.new_zeros(0, 12))
    basis.append(first, "f()")
    again = first.flip(0).repeat(2, 1) + scale * vectors(4)
    basis.append(again, "f()")
    orthonormal(basis)
    torch.testing.assert_close(basis.lower @ basis.rows, torch.cat([first, again]))


def test_left_out_directions_span_what_the_others_do_not():
    given = vectors(5)
    basis = Basis(given.new_zeros(0, 12))
    basis.append(given, "f()")
    lost = left_out(basis.lower)
    for i in range(5):
        others = torch.cat([given[:i], given[i + 1 :]])
        q = torch.linalg.qr(others.t())[0]
        expected = basis.rows.t() @ basis.rows - q @ q.t()
        direction = lost[i] @ basis.rows
        torch.testing.assert_close(torch.outer(direction, direction), expected)


@pytest.mark.parametrize("lower", [torch.zeros(3, 3), torch.diag(torch.tensor([2.0, 0.0, 1.0]))])
def test_zero_pivots_have_directions_too(lower):
    assert inverse_rows(lower).isfinite().all()
    torch.testing.assert_close(left_out(lower), torch.eye(3))
