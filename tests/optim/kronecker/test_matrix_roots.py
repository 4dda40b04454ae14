"""Matrix roots and eigenvectors: values, and derivatives where eigenvalues meet."""

import pytest
import torch

import metagrad as mg
from metagrad.optim.kronecker.matrix_roots import eigenvectors, inverse_root

F64 = torch.float64


def rotation(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=F64))[0]


def with_eigenvalues(*values, seed=0):
    q = rotation(len(values), seed)
    return q @ torch.diag(torch.tensor(values, dtype=F64)) @ q.T


SPECTRA = [(1.0, 2.0, 5.0), (2.0, 2.0, 5.0), (3.0, 3.0, 3.0), (1.0, 1.0 + 1e-9, 4.0)]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_power_of_the_root_is_the_inverse(p, dtype):
    a = torch.stack([with_eigenvalues(*values) for values in SPECTRA]).to(dtype)
    x = inverse_root(a, p)
    tolerance = 1e-10 if dtype == F64 else 1e-4
    eye = torch.eye(3, dtype=dtype).expand(4, 3, 3)
    torch.testing.assert_close(torch.linalg.matrix_power(x, p) @ a, eye, rtol=0, atol=tolerance)


@pytest.mark.parametrize("values", SPECTRA, ids=str)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_derivatives_of_roots_are_right_where_eigenvalues_meet(values, p):
    """The derivative of eigh is infinite there, and gives NaN."""
    a = with_eigenvalues(*values).requires_grad_()
    # Products keep what the finite differences perturb symmetric.
    assert mg.gradcheck(lambda b: inverse_root((b @ b.mT + b + b.mT) / 4, p), (a,), order=3)


def test_a_closed_form_of_three_orders_at_a_double_eigenvalue():
    """On multiples of the identity the root is a scalar's."""
    t = torch.tensor(2.0, dtype=F64, requires_grad=True)
    value = inverse_root(t * torch.eye(3, dtype=F64), 4)[0, 0]
    expected = 2.0**-0.25
    factor = 1.0
    for order in range(4):
        assert float(value.detach()) == pytest.approx(factor * expected * 2.0**-order, rel=1e-12)
        factor *= -0.25 - order
        (value,) = torch.autograd.grad(value, t, create_graph=True)


def test_vmap_at_every_order():
    batch = torch.stack([with_eigenvalues(*values) for values in SPECTRA])
    functions = [lambda a: inverse_root(a, 4)]
    for _ in range(2):
        functions.append(torch.func.grad(lambda a, f=functions[-1]: (f(a) ** 3).sum()))
    for function in functions:
        expected = torch.stack([function(a) for a in batch])
        torch.testing.assert_close(torch.func.vmap(function)(batch), expected, rtol=1e-9, atol=1e-12)


def test_zero_has_a_root_of_zero_with_derivatives_of_zero():
    g = torch.zeros(3, 2, dtype=F64, requires_grad=True)
    level = inverse_root(g @ g.T, 4)
    assert not level.any()
    for _ in range(3):
        (level,) = torch.autograd.grad((level**2).sum() + level.sum(), g, create_graph=True)
        assert not level.any()


def test_eigenvalues_below_rounding_are_taken_as_rounding():
    a = with_eigenvalues(0.0, 1.0, 1.0)
    x = inverse_root(a, 2)
    assert torch.linalg.eigvalsh(x)[-1] == pytest.approx((3 * torch.finfo(F64).eps) ** -0.5, rel=0.01)


@pytest.mark.parametrize("values", [(1.0, 2.0, 5.0), (0.0, 0.5, 4.0)], ids=str)
def test_eigenvectors_and_their_derivatives_where_eigenvalues_are_apart(values):
    a = with_eigenvalues(*values).requires_grad_()
    v = eigenvectors(a)
    torch.testing.assert_close(
        v.mT @ a @ v, torch.diag(torch.tensor(sorted(values)[::-1], dtype=F64)), rtol=0, atol=1e-12
    )
    assert mg.gradcheck(lambda a: eigenvectors((a + a.mT) / 2) ** 2, (a,), order=3, eps=2e-5, rtol=1e-4)


@pytest.mark.parametrize("values", [(2.0, 2.0, 5.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)], ids=str)
def test_eigenvectors_of_equal_eigenvalues_have_finite_derivatives(values):
    a = with_eigenvalues(*values).requires_grad_()
    level = eigenvectors(a)
    for _ in range(3):
        (level,) = torch.autograd.grad((level**3).sum(), a, create_graph=True)
        assert level.isfinite().all()


def test_what_is_no_square_matrix_of_a_known_dtype_is_refused():
    for call in (lambda a: inverse_root(a, 2), eigenvectors):
        for shape in ((2, 3), (3,), (0, 0)):
            with pytest.raises(ValueError, match="must be square and not empty, got shape"):
                call(torch.ones(shape))
        with pytest.raises(TypeError, match=r"the matrix: expected float32 or float64, got torch\.bfloat16"):
            call(torch.ones(2, 2, dtype=torch.bfloat16))
    for p in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=r"inverse_root\(matrix, p\): expected an int of 1 or more"):
            inverse_root(torch.eye(2), p)
