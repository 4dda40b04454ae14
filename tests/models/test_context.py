import copy

import pytest
import torch
from torch import nn

from metagrad.models import ContextInput, ContextMLP, Conv4, FiLM


def test_a_context_is_a_bias_of_the_first_layer():
    torch.manual_seed(0)
    model, x = ContextMLP([2, 4, 1], context=3).double(), torch.randn(5, 2).double()
    nn.init.normal_(model.context.vector)
    first = model.body[0]
    assert isinstance(first, nn.Linear)
    weight, of_context = first.weight.split([2, 3], 1)
    hidden = x @ weight.t() + of_context @ model.context.vector + first.bias
    torch.testing.assert_close(model(x), model.body[2](model.body[1](hidden)))


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 4)])
def test_film_is_an_affine_map_of_each_channel(shape):
    torch.manual_seed(0)
    layer, h = FiLM(nn.Parameter(torch.randn(2)), channels=3).double(), torch.randn(shape).double()
    scale, shift = (layer.modulation.weight @ layer.context.double()).view(2, 3)
    for c in range(3):
        torch.testing.assert_close(layer(h)[:, c], (1 + scale[c]) * h[:, c] + shift[c])


def test_blocks_share_one_context_and_at_zero_it_changes_nothing():
    torch.manual_seed(0)
    plain = Conv4(3, hidden=4, image_size=16, norm="group")
    model = copy.deepcopy(Conv4(3, hidden=4, image_size=16, norm="group", context=6))
    assert [name for name, _ in model.named_parameters() if "context" in name] == ["context"]
    others = [p for name, p in model.named_parameters() if "context" not in name and "modulation" not in name]
    with torch.no_grad():
        for own, other in zip(others, plain.parameters(), strict=True):
            own.copy_(other)
    x = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(model(x), plain(x))
    (gradient,) = torch.autograd.grad(model(x).sum(), [model.get_parameter("context")])
    assert bool(gradient.all())


def test_a_context_needs_an_entry():
    for make in (lambda: ContextInput(0), lambda: Conv4(2, context=-1)):
        with pytest.raises(ValueError, match="expected an int of 1 or more, got"):
            make()
