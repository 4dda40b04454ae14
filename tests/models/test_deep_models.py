"""The residual network and the transformer: shapes, derivatives, vectorized tasks, errors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.models import ResNet12, Transformer
from metagrad.models.transformer import _Attention
from metagrad.tasks import Batch, Examples
from tests.marks import slow

SMALL = {"width": 4, "heads": 2, "depth": 1}
MODELS = {
    "resnet, batch": lambda: ResNet12(3, 1, (2, 2), norm="batch"),
    "resnet, group": lambda: ResNet12(3, 1, (2, 2), norm="group"),
    "resnet, none": lambda: ResNet12(3, 1, (2, 2), norm="none"),
    "transformer, sequences": lambda: Transformer(3, (4, 2), **SMALL),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def inputs(name, *leading):
    shape = (4, 2) if "sequences" in name else (1, 4, 4)
    return torch.randn(*leading, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_meta_gradients_of_stacked_tasks_are_those_of_a_loop(name):
    labels = torch.arange(3).repeat(2, 1)
    support, query = inputs(name, 2, 2, 3)
    batch, model = Batch(Examples(support, labels), Examples(query, labels)), made(name)
    grads = []
    for chunk in (None, 1):
        maml = mg.MAML(model, F.cross_entropy, inner=mg.optim.rules.sgd(lr=0.1), steps=2, task_chunk=chunk)
        grads.append(torch.autograd.grad(maml(batch).loss, list(model.parameters())))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [slow("resnet, group"), "transformer, sequences"])
def test_third_derivatives(name):
    model, x = made(name), inputs(name, 2)
    first = next(p for p in model.parameters() if p.ndim > 1)
    key = next(key for key, p in model.named_parameters() if p is first)
    fn = lambda p: torch.func.functional_call(model, {key: p}, (x,)).tanh()  # noqa: E731
    assert mg.gradcheck(fn, first.detach().clone().requires_grad_(), order=3)


def test_a_residual_block_is_the_formula():
    model, x = made("resnet, none"), inputs("resnet", 2)
    block = model.blocks[0]
    weights = [p for name, p in block.residual.named_parameters()]
    h = x
    for i, weight in enumerate(weights):
        h = F.conv2d(h, weight, padding=1)
        h = h if i == 2 else F.leaky_relu(h, 0.1)
    h = F.max_pool2d(F.leaky_relu(h + F.conv2d(x, block.shortcut[0].weight), 0.1), 2)
    torch.testing.assert_close(block(x), h)


def test_attention_is_that_of_torch():
    torch.manual_seed(0)
    ours, theirs = _Attention(6, 2).double(), nn.MultiheadAttention(6, 2, batch_first=True).double()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.randn(3, 5, 6).double()
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet12(5, widths=()), r"ResNet12\(widths\): expected one or more ints of 1 or more, got"),
        (lambda: ResNet12(5)(torch.zeros(2, 1, 15, 28)), "height, width. with sides of at least 16, got"),
        (lambda: Transformer(5, (1, 28, 28)), r"patch=None\): input_shape: expected \(length, features\)"),
        (lambda: Transformer(5, (9, 2), patch=3), r"input_shape: expected \(channels, height, width\)"),
        (lambda: Transformer(5, (1, 28, 28), patch=5), r"patch must divide the image \(28, 28\), got 5"),
        (lambda: Transformer(5, (9, 2), width=6), "heads must divide width=6, got 4"),
        (lambda: Transformer(5, (9, 2), depth=0), r"Transformer\(depth\): expected an int of 1 or more, got"),
        (lambda: Transformer(5, (9, 2))(torch.zeros(2, 8, 2)), r"expected \[batch, 9, 2\], got \[2, 8, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
