import pytest
import torch
from torch import nn

import metagrad as mg
from metagrad.models import batch_norm, composite_norms, instance_norm, layer_norm
from tests.draws import draw


def affine(size):
    return {"weight": draw(*size, seed=1).requires_grad_(), "bias": draw(*size, seed=2).requires_grad_()}


LAYERS = {
    "layer": (lambda: nn.LayerNorm(5), (4, 5)),
    "layer over two axes": (lambda: nn.LayerNorm((3, 5)), (2, 3, 5)),
    "batch": (lambda: nn.BatchNorm1d(3), (6, 3)),
    "batch of images": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "batch in evaluation": (lambda: nn.BatchNorm1d(3).eval(), (6, 3)),
    "instance": (lambda: nn.InstanceNorm2d(3), (2, 3, 3, 2)),
    "instance with affine and statistics": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        (2, 3, 4),
    ),
    "instance in evaluation": (
        lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(),
        (2, 3, 4),
    ),
}


def layer_of(name):
    make, shape = LAYERS[name]
    layer = make().double()
    for index, p in enumerate(layer.parameters()):
        p.data = draw(*p.shape, seed=10 + index)
    return layer, draw(*shape).requires_grad_()


@pytest.mark.parametrize("name", LAYERS)
def test_values_first_gradients_and_statistics_equal_torch(name):
    (fused, x), (composite, _) = layer_of(name), layer_of(name)
    expected = fused(x)
    with composite_norms():
        found = composite(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dict(composite.named_buffers()), dict(fused.named_buffers()))
    grads = [
        torch.autograd.grad((y**3).sum(), [x, *layer.parameters()])
        for y, layer in ((found, composite), (expected, fused))
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_every_order(name):
    layer, x = layer_of(name)
    names = [n for n, _ in layer.named_parameters()]

    def fn(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    with composite_norms():
        assert mg.gradcheck(fn, [x, *layer.parameters()], order=3)


@pytest.mark.parametrize("name", ["layer", "batch", "instance"])
def test_torch_is_wrong_at_order_3(name):
    """If this test fails, torch is fixed and the functions can go. Since 2.14 torch raises for batches."""
    layer, x = layer_of(name)
    with pytest.raises(Exception, match=r"order 3|3rd"):
        mg.gradcheck(layer, x, order=3)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    """Squares of 300 overflow in float16, so torch also uses float32. Statistics may be float32, as in autocast."""
    fused, composite = (layer_of(name)[0].float() for _ in range(2))
    x = (300 * draw(*LAYERS[name][1])).to(dtype)
    expected = fused(x)
    with composite_norms():
        found = composite(x)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    torch.testing.assert_close(dict(composite.named_buffers()), dict(fused.named_buffers()))


def test_bad_input_is_named():
    x = draw(1, 3)
    with pytest.raises(ValueError, match=r"layer_norm\(input, normalized_shape\).*\(4,\), got \(1, 3\)"):
        layer_norm(x, [4])
    with pytest.raises(ValueError, match=r"batch_norm\(\.\.\., training=False\): expected running_mean"):
        batch_norm(x, None, None)
    with pytest.raises(ValueError, match=r"batch_norm\(input.*more than one value.*\(1, 3\)"):
        batch_norm(x, None, None, training=True)
    with pytest.raises(ValueError, match=r"instance_norm\(input.*more than one value.*\(1, 3\)"):
        instance_norm(x)
