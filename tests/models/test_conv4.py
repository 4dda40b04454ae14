import pytest
import torch
from torch.func import functional_call

from metagrad.models import Conv4

CASES = [
    ("max", "batch", "flatten"),
    ("max", "none", "mean"),
    ("stride", "group", "flatten"),
    ("stride", "batch", "mean"),
]
SMALL = {"ways": 3, "in_channels": 2, "hidden": 4, "image_size": 18}


def make(pool: str, norm: str, head: str) -> Conv4:
    torch.manual_seed(0)
    return Conv4(**SMALL, pool=pool, norm=norm, head=head).double()


def images(*leading: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*leading, 2, 18, 18, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("pool", "norm", "head"), CASES)
def test_shape_and_number_of_parameters(pool, norm, head):
    model = make(pool, norm, head)
    assert model(images(5)).shape == (5, 3)
    convolutions = (9 * 2 + 1) * 4 + 3 * (9 * 4 + 1) * 4
    norms = 0 if norm == "none" else 4 * 2 * 4
    final_size = (
        1 if head == "mean" or pool == "max" else 2
    )  # 18 -> 9 -> 5 -> 3 -> 2, or 18 -> 9 -> 4 -> 2 -> 1
    linear = (4 * final_size**2 + 1) * 3
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + linear


@pytest.mark.parametrize(("pool", "norm", "head"), CASES)
def test_vmap_over_stacked_parameters_equals_a_loop(pool, norm, head):
    model, x = make(pool, norm, head), images(3, 4)
    generator = torch.Generator().manual_seed(2)
    stacked = {
        name: p + 0.1 * torch.randn(3, *p.shape, dtype=p.dtype, generator=generator)
        for name, p in model.named_parameters()
    }
    batched = torch.vmap(lambda params, x: functional_call(model, params, (x,)))(stacked, x)
    loop = [functional_call(model, {n: p[k] for n, p in stacked.items()}, (x[k],)) for k in range(3)]
    torch.testing.assert_close(batched, torch.stack(loop), rtol=0, atol=1e-12)


def test_batch_norm_uses_the_batch_in_evaluation_too_and_keeps_nothing():
    model, x = make("max", "batch", "flatten"), images(6)
    assert list(model.buffers()) == []
    assert torch.equal(model.train()(x), model.eval()(x))
    assert not torch.allclose(model(x)[:3], model(x[:3]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ways": 0}, r"Conv4\(ways\): expected an int of 1 or more, got 0"),
        ({"image_size": 15}, 'image_size must be at least 16 .* got 15.*pool="stride"'),
        (
            {"norm": "layer"},
            r"Conv4\(norm\): expected one of 'batch', 'running', 'group', 'none', got 'layer'",
        ),
    ],
)
def test_construction_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        Conv4(**{"ways": 5, **arguments})


@pytest.mark.parametrize("shape", [(1, 28, 28), (2, 3, 28, 28), (2, 1, 28, 29)])
def test_images_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"Conv4\(x\): x must be \[batch, 1, 28, 28\], got \["):
        Conv4(5)(torch.zeros(shape))
