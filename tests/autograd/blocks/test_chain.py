"""What counts as a chain, and where it is split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.autograd import block_gradient, chain


def squares(prediction, y):
    return (prediction - y).square().mean()


def names(made) -> list[str]:
    return [block.name for block in made.blocks]


def layer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


class Stack(nn.Module):
    """A model whose blocks are in a list; ``twist`` is what its forward does besides."""

    def __init__(self, twist=lambda self, x: x) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList([layer(), layer()])
        self.position = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(3, 2)
        self.twist = twist

    def forward(self, x):
        x = self.twist(self, self.embed(x))
        for block in self.layers:
            x = block(x)
        return self.head(x)


def with_positions(self, x):
    return x + self.position


def test_a_sequential_is_split_down_to_its_blocks():
    assert names(chain(layer(), squares)) == ["0..1"]
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(3, 3)
    )
    assert names(chain(layers, squares)) == ["0", "1..3", "4"]
    assert names(chain(nn.Sequential(layer(), layer()), squares)) == ["0", "1"]
    encoder = nn.TransformerEncoderLayer(4, 2, 8)
    deep = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(encoder, encoder), nn.Sequential(nn.Linear(4, 1), nn.Tanh())
    )
    made = chain(deep, squares)
    assert names(made) == ["0", "1.0", "1.1", "2"]
    assert made.blocks[3].parameters == ("2.0.weight", "2.0.bias")
    assert made.blocks[1].parameters == made.blocks[2].parameters


def test_a_container_with_hooks_or_a_forward_of_its_own_is_one_block():
    class Skip(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    hooked = nn.Sequential(layer(), layer())
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    model = nn.Sequential(nn.Sequential(Skip(layer(), nn.Linear(3, 3)), hooked), nn.Linear(3, 1))
    made = chain(model, squares)
    assert names(made) == ["0.0", "0.1", "1"]
    x = torch.randn(4, 3)
    torch.testing.assert_close(made.predict({}, x), model(x))


def test_a_loss_is_a_function_of_the_parameters():
    model = nn.Sequential(layer(), nn.Linear(3, 1))
    loss, x, y = chain(model, squares), torch.randn(4, 3), torch.randn(4, 1)
    params = {k: torch.randn_like(p) for k, p in model.named_parameters()}
    expected = squares(torch.func.functional_call(model, params, (x,)), y)
    torch.testing.assert_close(loss(params, x, y), expected)
    torch.testing.assert_close(loss({}, x, y), squares(model(x), y))
    some = {k: v for k, v in params.items() if k != "1.bias"}
    expected = squares(torch.func.functional_call(model, some, (x,)), y)
    torch.testing.assert_close(loss(some, x, y), expected)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_parameters_return_to_their_places_after_an_error():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 1))
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chain(model, squares)(
            {k: p.detach() for k, p in before.items()}, torch.randn(2, 3), torch.randn(2, 1)
        )
    assert all(p is before[k] for k, p in model.named_parameters())


def test_values_are_exchanged_during_a_functional_call_too():
    model = nn.Sequential(layer(), nn.Linear(3, 1))
    loss, x, y = chain(model, squares), torch.randn(4, 3), torch.randn(4, 1)
    params = {k: torch.randn_like(p) for k, p in model.named_parameters()}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self):
            return loss(params, x, y)

    other = {f"inner.{k}": torch.zeros_like(p) for k, p in params.items()}
    torch.testing.assert_close(torch.func.functional_call(Outer(), other, ()), loss(params, x, y))


def test_children_in_their_order_are_held_to_the_model():
    model, x = Stack(), torch.randn(4, 3)
    made = chain(model, squares, example=x)
    assert names(made) == ["embed", "layers.0", "layers.1", "head"]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, nn.LayerNorm(4), enable_nested_tensor=False
    )
    assert names(chain(encoder, squares, example=torch.randn(2, 3, 4))) == ["layers.0", "layers.1", "norm"]


TWISTS = {
    "a parameter that is zero": with_positions,
    "a function": lambda self, x: F.relu(x),
    "a skip connection": lambda self, x: x + self.layers[0](x),
    "another shape": lambda self, x: x[:, None],
}


@pytest.mark.parametrize("twist", TWISTS)
def test_a_model_that_does_more_is_refused(twist):
    with pytest.raises(
        ValueError, match=r"Stack is not the composition of the blocks embed, layers.0.*blocks=\[...\]"
    ):
        chain(Stack(TWISTS[twist]), squares, example=torch.randn(4, 3))


def test_children_that_do_not_fit_together_are_refused():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 2), nn.Linear(3, 4)

        def forward(self, x):
            return self.last(self.first(x))

    with pytest.raises(ValueError, match=r"the blocks last, first cannot be called one after the other"):
        chain(Two(), squares, example=torch.randn(5, 3))
    model = Two()
    made = chain(model, squares, blocks=[model.first, model.last], example=torch.randn(5, 3))
    assert names(made) == ["first", "last"]


def test_blocks_may_be_functions():
    model, x = Stack(with_positions).double(), torch.randn(4, 3, dtype=torch.float64)
    blocks = [lambda x: with_positions(model, model.embed(x)), *model.layers, model.head]
    loss = chain(model, squares, blocks=blocks, example=x)
    assert names(loss) == ["blocks[0]", "layers.0", "layers.1", "head"]
    params = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    y = torch.randn(4, 2, dtype=torch.float64)
    grads = [
        block_gradient(loss, params, x, y).gradient.values(),
        torch.autograd.grad(loss(params, x, y), list(params.values()), create_graph=True),
    ]
    seconds = [torch.autograd.grad(sum(g.pow(3).sum() for g in gs), list(params.values())) for gs in grads]
    torch.testing.assert_close(*seconds)
    wrong = [model.embed, *model.layers, model.head]
    with pytest.raises(ValueError, match="is not the composition"):
        chain(model, squares, blocks=wrong, example=x)


def test_the_comparison_leaves_no_trace():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
            self.count: Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return self.body(x)

    model = Counted()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    chain(model, squares, example=torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.rand(3), expected)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_what_is_not_known_is_refused_with_the_alternatives():
    with pytest.raises(
        ValueError, match=r"Stack has a forward of its own.*example=.*memory=\"step\".*mode=\"reverse\""
    ):
        chain(Stack(), squares)
    hooked = layer()
    hooked.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match="Sequential has hooks, so its blocks are not known"):
        chain(hooked, squares)
    with pytest.raises(ValueError, match=r"blocks=...\): pass an input as example= as well"):
        chain(Stack(), squares, blocks=[nn.Linear(3, 2)])
    with pytest.raises(ValueError, match="Sequential has no blocks"):
        chain(nn.Sequential(), squares)
