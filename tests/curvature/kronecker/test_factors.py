"""Factors against the Fisher and Gauss-Newton matrices that they stand for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.curvature.kronecker.factors import (
    NO_SUMS,
    Factors,
    Sums,
    diagonalized,
    scaling_of,
    split_damping,
    updated,
)
from metagrad.curvature.kronecker.layers import input_rows, output_rows
from tests.curvature.maps import drawn

F64 = torch.float64


def block(factors):
    """Return the matrix that acts on a flattened gradient ``[outputs, inputs]``."""
    return torch.kron(factors.outputs, factors.inputs)


def factors_of(sums, weight):
    """Return the factors of one estimate."""
    found = updated({}, sums, weight, 0.9)
    return Factors(found["inputs"], found["outputs"])


def test_a_convolution_is_the_linear_layer_on_its_patches():
    """Theorem 1: patches are summed over positions, gradients averaged."""
    conv, x, g = nn.Conv2d(2, 3, 3, padding=1, dtype=F64), drawn(4, 2, 5, 5), drawn(4, 3, 5, 5, seed=2)
    factors = factors_of(NO_SUMS.plus([(input_rows(conv, x, has_bias=True), output_rows(conv, g))]), 4)
    patches = F.pad(F.unfold(x, 3, padding=1).mT, (0, 1), value=1.0)
    omega = torch.einsum("nti,ntj->ij", patches, patches) / 4
    gradients = 4 * g.flatten(2)
    gamma = torch.einsum("nit,njt->ij", gradients, gradients) / (4 * 25)
    torch.testing.assert_close(factors.inputs, omega, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(factors.outputs, gamma, rtol=1e-12, atol=1e-12)


def factors_at_random():
    a, g = drawn(9, 1, 4, seed=1), drawn(9, 1, 3, seed=2)
    return factors_of(NO_SUMS.plus([(a, g)]), 9), a, g


def block_of(block, factors, decay=0.9, damping=None):
    """Return the block of a layer after an estimate."""
    return updated(block, Sums(*factors, 1, 1), 1.0, decay, damping=damping)


def test_the_damping_is_split_by_pi():
    factors, *_ = factors_at_random()
    (mean_a, mean_g), damping = ([factor.trace() / len(factor) for factor in factors]), 0.3
    for_inputs, for_outputs = split_damping(factors, damping)
    torch.testing.assert_close(for_inputs / for_outputs, mean_a / mean_g)
    torch.testing.assert_close(for_inputs * for_outputs, torch.tensor(damping, dtype=F64))
    zero = Factors(torch.zeros(3, 3), torch.eye(2))
    assert [float(s) for s in split_damping(zero, 0.25)] == [0.5, 0.5]


def test_preconditioning_is_the_inverse_of_the_damped_product():
    factors, *_ = factors_at_random()
    gradient = drawn(3, 4, seed=3)
    shares = split_damping(factors, 0.1)
    damped = Factors(*(f + s * torch.eye(len(f), dtype=F64) for f, s in zip(factors, shares, strict=True)))
    expected = torch.linalg.solve(block(damped), gradient.flatten()).reshape(3, 4)
    inverses = block_of({}, factors, damping=0.1)
    got = inverses["output_inverse"] @ gradient @ inverses["input_inverse"]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_a_factor_that_is_singular_needs_damping():
    with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
        block_of({}, Factors(torch.zeros(2, 2), torch.eye(2)), damping=0.0)


def eigenvectors_of(factors):
    return Factors(*(torch.linalg.eigh(factor)[1] for factor in factors))


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_corrected_eigenvalues_are_the_diagonal_in_the_basis_of_the_factors(positions, seed):
    """The diagonal of the empirical Fisher matrix in the basis is the nearest in Frobenius norm."""
    a, g = drawn(9, positions, 4, seed=seed), drawn(9, positions, 3, seed=seed + 100)
    g = g * (1 + a[..., :1] ** 2)  # gradients that depend on inputs
    gradients = (g.mT @ a).flatten(1) * 9
    fisher = gradients.T @ gradients / 9
    factors = factors_of(NO_SUMS.plus([(a, g)]), 9)
    basis = eigenvectors_of(factors)
    scaling = 9 * scaling_of(a, g, basis, max_elements=30)
    vectors = torch.kron(basis[1], basis[0])
    torch.testing.assert_close(
        scaling.flatten(), torch.diag(vectors.T @ fisher @ vectors), rtol=1e-10, atol=1e-12
    )


def test_between_two_bases_factors_and_their_eigenvalues_are_averaged():
    factors, a, g = factors_at_random()

    def after(block, scale, *, is_due):
        block = block_of(block, [scale * factor for factor in factors], 0.6)
        return diagonalized(block, lambda basis: 9 * scale * scaling_of(a, g, basis), 0.6, is_due=is_due)

    first = after({}, 1, is_due=True)
    second = after(first, 2, is_due=False)
    assert second["input_basis"] is first["input_basis"]
    assert second["updates"] == 2
    for name in ("inputs", "outputs", "scaling"):
        torch.testing.assert_close(second[name], 1.5 * first[name], rtol=1e-12, atol=0)
    third = after(second, 1, is_due=True)
    torch.testing.assert_close(third["inputs"], (0.6 * 1.5 + 0.4) * factors.inputs, rtol=1e-12, atol=0)
    # not averaged in a new basis
    torch.testing.assert_close(third["scaling"], first["scaling"], rtol=1e-10, atol=1e-14)
