"""Layers as products of rows with a matrix, and their factors against the Fisher and Gauss-Newton matrices."""

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
from metagrad.curvature.kronecker.layers import (
    input_rows,
    known_layers,
    output_rows,
)
from tests.curvature.maps import drawn

F64 = torch.float64
CONVOLUTIONS = [
    (nn.Conv1d, (5,), {"kernel_size": 3}),
    (nn.Conv1d, (7,), {"kernel_size": 3, "dilation": 2, "stride": 2, "padding": 1, "bias": False}),
    (nn.Conv1d, (6,), {"kernel_size": 4, "padding": "same"}),
    (nn.Conv2d, (5, 6), {"kernel_size": (2, 3)}),
    (nn.Conv2d, (5, 6), {"kernel_size": 3, "stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
    (nn.Conv2d, (5, 6), {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
    (nn.Conv2d, (5, 6), {"kernel_size": 3, "padding": "same", "padding_mode": "reflect"}),
    (nn.Conv2d, (5, 6), {"kernel_size": 2, "padding": "valid"}),
    (nn.Conv3d, (3, 4, 5), {"kernel_size": (1, 2, 3), "padding": (0, 1, 1), "stride": (1, 2, 1)}),
]


def made(make, *args, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args, **options, dtype=F64)


def joined(weight, bias):
    """Return the weight as a matrix, with the bias as the last column."""
    flat = weight.flatten(1)
    return flat if bias is None else torch.cat([flat, bias.unsqueeze(-1)], -1)


def assert_linear(layer, x):
    """The output is rows times the matrix of weights, and its gradient the product of rows."""
    y, has_bias = layer(x), layer.bias is not None
    rows = input_rows(layer, x, has_bias=has_bias)
    matrix = joined(layer.weight, layer.bias)
    torch.testing.assert_close(output_rows(layer, y), rows @ matrix.T, rtol=1e-12, atol=1e-12)
    weights = drawn(*y.shape)
    grads = torch.autograd.grad((y * weights).sum(), list(layer.parameters()))
    product = output_rows(layer, weights).flatten(0, 1).T @ rows.flatten(0, 1)
    torch.testing.assert_close(joined(*(*grads, None)[:2]), product, rtol=1e-12, atol=1e-12)
    assert input_rows(layer, x, has_bias=False).shape[-1] == layer.weight[0].numel()


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths:UserWarning")
@pytest.mark.parametrize(("make", "size", "options"), CONVOLUTIONS)
def test_a_convolution_is_a_linear_layer_on_patches(make, size, options):
    layer = made(make, 2, 3, **options)
    assert_linear(layer, drawn(4, 2, *size))
    assert_linear(layer, drawn(2, *size))


@pytest.mark.parametrize("shape", [(4,), (6, 4), (6, 3, 4), (6, 2, 3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_on_sequences(shape, bias):
    layer = made(nn.Linear, 4, 3, bias=bias)
    assert_linear(layer, drawn(*shape))
    assert len(input_rows(layer, drawn(*shape), has_bias=bias)) == (shape[0] if len(shape) > 1 else 1)


def test_other_modules_are_named_in_one_warning():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), Shifted(4, 4), nn.Conv1d(1, 1, 1))
    with pytest.warns(UserWarning, match=r"plain gradient: 1 \(LayerNorm\), 3 \(Shifted\)\.$") as caught:
        layers = known_layers("KFAC(model)", model, set(model.parameters()))
    assert len(caught) == 1
    assert list(layers) == ["0", "4"]


def test_frozen_layers_are_left_out_without_a_warning():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).requires_grad_(False), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert list(known_layers("KFAC(model)", model, set(model.parameters()))) == ["2"]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (nn.Linear(4, 3, bias=False), r"'head' shares a parameter with \['embed'\]"),
        (nn.Conv1d(4, 4, 1, groups=2), r"'head' is a convolution of 2 groups.*groups=1"),
    ],
)
def test_layers_without_factors_are_refused_by_name_unless_they_stay(head, message):
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "body": nn.Linear(4, 4), "head": head})
    if isinstance(head, nn.Linear):
        head.weight = model["embed"].weight
    with pytest.raises(ValueError, match=message):
        known_layers("KFAC(model)", model, set(model.parameters()))
    assert list(known_layers("KFAC(model)", model, set(model["body"].parameters()))) == ["body"]


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
