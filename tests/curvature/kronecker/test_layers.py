"""Layers as products of rows with a matrix."""

import pytest
import torch
from torch import nn

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
