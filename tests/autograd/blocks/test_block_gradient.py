"""Gradients of chains, block by block, against one tape, dense Hessians and finite differences."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import metagrad as mg
from metagrad.autograd import Block, Chain, block_gradient, chain
from metagrad.memory.storages import Ledger, StorageMode


def randn(*shape, seed=0, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def squares(prediction, y):
    return (prediction - y).square().mean()


def heads(prediction, y):
    return F.cross_entropy(prediction.flatten(0, -2), y.flatten())


class Residual(nn.Module):
    """Attention and a layer, around both of which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.RMSNorm(width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.gelu(F.scaled_dot_product_attention(q, k, v)))


class Masked(nn.Module):
    """A block that hands a mask on beside what it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        x, mask = pair
        return torch.tanh(self.linear(x)) * mask, mask


class Tied(nn.Module):
    """The output layer of a language model that shares its weight with the embedding."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = table.weight

    def forward(self, x):
        return x @ self.weight.t()


class Case(NamedTuple):
    model: nn.Module
    loss_fn: object
    x: object
    y: Tensor
    order: int = 3


def mlp():
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.ELU(inplace=True), nn.Linear(4, 2)]
    return Case(nn.Sequential(*layers), squares, randn(5, 3).requires_grad_(), randn(5, 2).requires_grad_())


def conv():
    block = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.SiLU())
    model = nn.Sequential(
        block, nn.Sequential(nn.Conv2d(2, 2, 3), nn.Softplus()), nn.Flatten(), nn.Linear(8, 3)
    )
    return Case(model, heads, randn(2, 1, 4, 4).requires_grad_(), torch.tensor([0, 2]))


def attention():
    model = nn.Sequential(nn.Linear(3, 4), Residual(4), Residual(4), nn.Linear(4, 2))
    return Case(model, heads, randn(2, 3, 3), torch.tensor([[0, 1, 1], [1, 0, 1]]))


def transformer(training=True):
    layers = [
        nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True, norm_first=True) for _ in range(2)
    ]
    model = nn.Sequential(*layers).train(training)
    return Case(model, squares, randn(2, 3, 4).requires_grad_(), randn(2, 3, 4, seed=1), order=2)


def language():
    table = nn.Embedding(5, 3)
    model = nn.Sequential(table, Residual(3), Tied(table))
    return Case(model, heads, torch.tensor([[0, 1, 4], [2, 2, 0]]), torch.tensor([[1, 4, 0], [2, 0, 3]]))


def repeated():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return Case(nn.Sequential(layer, nn.Sigmoid(), layer, layer), squares, randn(4, 3), randn(4, 3, seed=1))


def dropout():
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.5))
    return Case(model, squares, randn(5, 3), randn(5, 6, seed=1))


def batch_norm():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    return Case(model, squares, randn(6, 3).requires_grad_(), randn(6, 2, seed=1), order=2)


def masked():
    def loss_fn(prediction, y):
        return squares(prediction[0], y)

    x = (randn(4, 3).requires_grad_(), torch.tensor([[True], [False], [True], [True]]))
    return Case(nn.Sequential(Masked(3), Masked(3)), loss_fn, x, randn(4, 3, seed=1))


class Twice(nn.Module):
    """A block that returns one tensor in two places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair):
        x = torch.tanh(self.linear(pair[0]) * pair[1])
        return x, x


def one_tensor_twice():
    def loss_fn(prediction, y):
        return squares(prediction[0] * prediction[1], y)

    x = randn(4, 3).requires_grad_()
    return Case(nn.Sequential(Twice(3), Twice(3)), loss_fn, (x, x), randn(4, 3, seed=1))


class Scale(torch.autograd.Function):
    """A square times a number that is kept for the backward pass."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return factor * x.square()

    @staticmethod
    def backward(ctx, cotangent):
        return 2 * ctx.factor * ctx.saved_tensors[0] * cotangent, None


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Scale.apply(self.linear(x), 0.5) * Scale.apply(self.weight, 0.3)


def custom_functions():
    model = nn.Sequential(Scaled(3), Scaled(3), nn.Linear(3, 2))
    return Case(model, squares, randn(4, 3), randn(4, 2, seed=1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 2)

    def forward(self, x):
        return self.lstm(x)[0]


def recurrent():
    model = nn.Sequential(Recurrent(), nn.Tanh(), Recurrent())
    return Case(model, squares, randn(3, 2, 2), randn(3, 2, 2, seed=1))


def one_block():
    return Case(
        nn.Sequential(nn.Linear(3, 2)), lambda p, y: (p - y).pow(4).sum(), randn(4, 3), randn(4, 2, seed=1)
    )


CASES = [
    mlp,
    conv,
    attention,
    transformer,
    language,
    repeated,
    dropout,
    batch_norm,
    masked,
    one_tensor_twice,
    custom_functions,
    recurrent,
    one_block,
]


def made(case) -> tuple[Case, dict[str, Tensor]]:
    """Build a case in float64, and other values for its parameters."""
    torch.manual_seed(0)
    built = case()
    built.model.double()
    return built, {
        k: (p.detach() + 0.1 * randn(*p.shape, seed=2)).requires_grad_()
        for k, p in built.model.named_parameters()
    }


def ordinary(loss, params, x, y):
    """Return loss and gradient on one tape; the attention of blocks is the one with second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        value = loss(params, x, y)
    grads = torch.autograd.grad(
        value, list(params.values()), torch.ones_like(value), create_graph=True, materialize_grads=True
    )
    return value, dict(zip(params, grads, strict=True))


def derivatives(operation, loss, params, x, y, orders, others=()) -> list[Tensor]:
    """Return values and gradients of non-linear contractions of all lower derivatives, order by order."""
    leaves = [t for t in mg.core.tree.tensors_in((params, x, y, list(others))) if t.requires_grad]
    torch.manual_seed(7)
    value, grads = operation(loss, params, x, y)
    assert value.requires_grad
    assert all(g.requires_grad for g in grads.values())
    total = value.pow(2).sum() + sum((g**3 + g).sum() for g in grads.values())
    collected = [value, *grads.values()]
    for _ in range(orders - 1):
        found = torch.autograd.grad(total, leaves, create_graph=True)
        assert all(g.requires_grad for g in found)
        collected += found
        total = total + sum((g**3 + g).sum() for g in found)
    return collected


def assert_same(got, expected, rtol=1e-9):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * (1 + float(b.detach().abs().max())))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_order_equals_that_of_one_tape(case):
    (model, loss_fn, x, y, order), params = made(case)
    loss = chain(model, loss_fn)
    expected = derivatives(ordinary, loss, params, x, y, order)
    assert_same(derivatives(block_gradient, loss, params, x, y, order), expected)


def test_the_derivative_of_a_part_of_the_gradient_through_custom_functions():
    (model, loss_fn, x, y, _), params = made(custom_functions)
    for part in params:
        _, grads = block_gradient(chain(model, loss_fn), params, x, y)
        _, expected = ordinary(chain(model, loss_fn), params, x, y)
        found, reference = (
            torch.autograd.grad(g[part].pow(3).sum(), list(params.values()), materialize_grads=True)
            for g in (grads, expected)
        )
        assert_same(found, reference)


@pytest.mark.parametrize("memory", ["full", "step", "sqrt"])
def test_meta_gradients_through_several_steps(memory):
    (model, loss_fn, x, y, _), params = made(mlp)
    loss = chain(model, loss_fn)

    def meta(operation):
        def step(params, t):
            value, grads = operation(loss, params, x, y)
            return {k: p - 0.5 * grads[k] for k, p in params.items()}, value

        fast, values = mg.unroll(step, params, steps=3, memory=memory)
        return loss(fast, x, y) + values.pow(2).sum()

    leaves = [*params.values(), x, y]
    found = [torch.autograd.grad(meta(operation), leaves) for operation in (block_gradient, ordinary)]
    assert_same(*found)


def test_inside_a_checkpoint():
    (model, loss_fn, x, y, _), params = made(mlp)
    loss = chain(model, loss_fn)
    expected = derivatives(ordinary, loss, params, x, y, 3)

    def recomputed(loss, params, x, y):
        return mg.checkpoint(lambda params, x: tuple(block_gradient(loss, params, x, y)), params, x)

    assert_same(derivatives(recomputed, loss, params, x, y, 3), expected)


@pytest.mark.parametrize("seen", ["loss", "gradient", "one gradient", "both"])
def test_cotangents_for_some_of_the_results(seen):
    (model, loss_fn, x, y, _), params = made(mlp)
    loss = chain(model, loss_fn)

    def scalar(operation):
        value, grads = operation(loss, params, x, y)
        chosen = {"loss": [], "one gradient": ["2.weight"]}.get(seen, list(grads))
        total = sum((grads[k] ** 3).sum() for k in chosen)
        return total + value.exp() if seen in ("loss", "both") else total

    leaves = [*params.values(), x, y]
    found = [
        torch.autograd.grad(scalar(operation), leaves, materialize_grads=True)
        for operation in (block_gradient, ordinary)
    ]
    assert_same(*found)


def test_parameters_that_are_not_exchanged_and_other_tensors_are_operands():
    (model, _, x, y, _), params = made(mlp)
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    loss = chain(model, lambda prediction, y: squares(prediction, y) * weight.exp())
    some = {k: p for k, p in params.items() if not k.startswith("2")}
    others = [weight, model[2].weight, model[2].bias]
    expected = derivatives(ordinary, loss, some, x, y, 3, others)
    assert_same(derivatives(block_gradient, loss, some, x, y, 3, others), expected)
    last = {"4.bias": params["4.bias"]}  # no block below moves
    expected = derivatives(ordinary, loss, last, x, y, 2, others)
    assert_same(derivatives(block_gradient, loss, last, x, y, 2, others), expected)


def test_the_model_s_own_parameters_and_values_that_do_not_require_grad():
    (model, loss_fn, x, y, _), _ = made(mlp)
    loss = chain(model, loss_fn)
    own = dict(model.named_parameters())
    expected = derivatives(ordinary, loss, own, x, y, 3)
    assert_same(derivatives(block_gradient, loss, own, x, y, 3), expected)
    fixed = {k: p.detach() for k, p in own.items()}
    value, grads = block_gradient(loss, fixed, x, y)
    torch.testing.assert_close([value, *grads.values()], expected[: 1 + len(own)])
    (mixed,) = torch.autograd.grad(grads["0.weight"].pow(3).sum(), x)
    (expected_mixed,) = torch.autograd.grad(ordinary(loss, own, x, y)[1]["0.weight"].pow(3).sum(), x)
    torch.testing.assert_close(mixed, expected_mixed)
    with torch.no_grad():
        value, grads = block_gradient(loss, own, x, y)
    assert not value.requires_grad
    torch.testing.assert_close([value, *grads.values()], [e.detach() for e in expected[: 1 + len(own)]])


def test_the_random_generator_moves_once_and_running_statistics_are_updated_once():
    for case in (dropout, batch_norm):
        states = []
        for operation in (block_gradient, ordinary):
            (model, loss_fn, x, y, _), params = made(case)
            torch.manual_seed(3)
            _, grads = operation(chain(model, loss_fn), params, x, y)
            torch.autograd.grad(sum(g.pow(2).sum() for g in grads.values()), list(params.values()))
            states.append([torch.rand(1), *model.buffers()])
        assert_same(*states)


def test_third_derivatives_that_torch_has_wrong_are_refused():
    (model, loss_fn, x, y, _), params = made(batch_norm)
    _, grads = block_gradient(chain(model, loss_fn), params, x, y)
    (second,) = torch.autograd.grad(sum(g.pow(2).sum() for g in grads.values()), x, create_graph=True)
    with pytest.raises(ValueError, match=r"differentiated twice: .*BatchNorm.* silently wrong"):
        torch.autograd.grad(second.pow(2).sum(), x)


def test_a_block_without_second_derivative_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Hardsigmoid()).double()
    loss = chain(model, squares)
    params = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    _, grads = block_gradient(loss, params, randn(4, 3), randn(4, 4))
    with pytest.raises(ValueError, match=r"block '0..2': HardsigmoidBackward0, from F.hardsigmoid, raises"):
        torch.autograd.grad(grads["0.weight"].sum(), params["0.weight"])


class Constants(nn.Module):
    """What forward mode gets wrong or cannot do: a constant scale, a hook, a custom rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        h = self.linear(x)
        with torch.no_grad():
            scale = h.square().mean().sqrt()
        h = Cube.apply(h / scale)
        h.register_hook(lambda g: 3 * g)
        return h


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def test_the_derivative_is_the_tape_s_where_forward_mode_has_another():
    torch.manual_seed(0)
    model = nn.Sequential(Constants(), nn.Tanh(), Constants()).double()
    loss = chain(model, squares)
    params = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    x, y = randn(4, 3).requires_grad_(), randn(4, 3, seed=1)
    expected = derivatives(ordinary, loss, params, x, y, 2)
    assert_same(derivatives(block_gradient, loss, params, x, y, 2), expected)


def test_attention_in_evaluation():
    (model, loss_fn, x, y, order), params = made(lambda: transformer(training=False))
    loss = chain(model, loss_fn)
    expected = derivatives(ordinary, loss, params, x, y, order)
    assert_same(derivatives(block_gradient, loss, params, x, y, order), expected)
    torch.autograd.grad(block_gradient(loss, params, x.detach(), y).loss, list(params.values()))


def test_float32_and_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    loss = chain(model, squares)
    params = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    x, y = randn(6, 8, dtype=torch.float32).requires_grad_(), randn(6, 4, dtype=torch.float32)
    assert_same(
        derivatives(block_gradient, loss, params, x, y, 3), derivatives(ordinary, loss, params, x, y, 3), 1e-4
    )

    def second(operation, enabled):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value, grads = operation(loss, params, x, y)
        return torch.autograd.grad(value + sum(g.pow(3).sum() for g in grads.values()), list(params.values()))

    got, exact = second(block_gradient, True), second(ordinary, False)
    assert any(not torch.allclose(a, b, rtol=1e-5) for a, b in zip(got, exact, strict=True))
    assert_same(got, second(ordinary, True), 2e-2)


def test_losses_of_several_tasks_have_the_gradient_of_their_sum():
    (model, _, x, y, _), params = made(mlp)
    loss = chain(model, lambda prediction, y: (prediction - y).square().mean(1))
    expected = derivatives(ordinary, loss, params, x, y, 2)
    assert expected[0].shape == (5,)
    assert_same(derivatives(block_gradient, loss, params, x, y, 2), expected)


def test_blocks_of_one_s_own_take_stacked_parameters():
    (model, _, _, _, _), params = made(mlp)

    def stacked(block):
        return Block(block.name, block.parameters, torch.vmap(block.call))

    one = chain(model, squares)
    loss = Chain(model, tuple(map(stacked, one.blocks)), lambda p, y: (p - y).square().mean((1, 2)))
    tasks = {k: torch.stack([p, p.sin()]).detach().requires_grad_() for k, p in params.items()}
    x, y = randn(2, 5, 3).requires_grad_(), randn(2, 5, 2, seed=1)
    got = derivatives(block_gradient, loss, tasks, x, y, 3)
    assert_same(got, derivatives(ordinary, loss, tasks, x, y, 3))
    for i in range(2):
        alone = block_gradient(one, {k: p[i] for k, p in tasks.items()}, x[i], y[i])
        assert_same([alone.loss, *alone.gradient.values()], [part[i] for part in got[: 1 + len(tasks)]])


def test_parameters_that_are_not_used_have_zeros():
    class Half(nn.Linear):
        def forward(self, x):
            return x @ self.weight.t()

    model = nn.Sequential(Half(2, 2), nn.Linear(2, 1)).double()
    params = dict(model.named_parameters())
    _, grads = block_gradient(chain(model, squares), params, randn(3, 2), randn(3, 1))
    assert torch.equal(grads["0.bias"], torch.zeros(2, dtype=torch.float64))
    assert list(grads) == list(params)


WIDTH = 16


@functools.cache
def peak(blockwise: bool, blocks: int, examples: int) -> int:
    """Return the peak bytes of a gradient and of its derivative in a direction."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(blocks)]
    model = nn.Sequential(*(nn.Sequential(*block) for block in layers)).double()
    loss = chain(model, squares)
    params = {k: p.detach().requires_grad_() for k, p in model.named_parameters()}
    directions = [torch.randn_like(p) for p in params.values()]
    x, y = randn(examples, WIDTH), randn(examples, WIDTH, seed=1)
    with StorageMode(ledger := Ledger(torch.device("cpu"))):
        _, grads = (block_gradient if blockwise else ordinary)(loss, params, x, y)
        torch.autograd.grad(list(grads.values()), list(params.values()), directions)
    return ledger.peak


def growth(blockwise: bool, examples: int) -> float:
    return (peak(blockwise, 24, examples) - peak(blockwise, 12, examples)) / 12


def test_memory_is_that_of_boundaries_and_one_block():
    boundary, weights = WIDTH * 8, 2 * (WIDTH + 1) * WIDTH * 8
    # A block leaves what it is handed and its rate of change, and its gradient.
    assert growth(True, 512) <= 1.05 * (2 * 512 * boundary + weights)
    assert growth(True, 512) <= growth(False, 512) / 5
    assert peak(True, 24, 512) <= peak(False, 24, 512) / 3
    # With few examples the peak is at the end: the gradient, and its derivative.
    assert growth(True, 1) <= 2 * weights + boundary


def test_no_graph_is_kept_between_the_passes():
    (model, loss_fn, x, y, _), params = made(mlp)
    loss = chain(model, loss_fn)
    with StorageMode(ledger := Ledger(torch.device("cpu"))):
        value, grads = block_gradient(loss, params, x, y)
    results = value.nbytes + sum(g.nbytes for g in grads.values())
    assert ledger.total <= results + value.nbytes  # and the cotangent of the loss


def test_an_operand_that_is_modified_in_place_is_noticed():
    (model, loss_fn, x, y, _), params = made(mlp)
    _, grads = block_gradient(chain(model, loss_fn), params, x, y)
    with torch.no_grad():
        params["0.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(grads["0.weight"].pow(2).sum(), x)


def test_names_and_values_of_parameters_are_checked():
    (model, loss_fn, x, y, _), params = made(mlp)
    loss = chain(model, loss_fn)
    with pytest.raises(ValueError, match=r"no block of Sequential has a parameter 'w'.*named_parameters"):
        block_gradient(loss, {"w": x}, x, y)
    with pytest.raises(
        TypeError, match=r"params\['0.bias'\] must be a floating point tensor, got torch.int64"
    ):
        block_gradient(loss, {**params, "0.bias": torch.zeros(4, dtype=torch.int64)}, x, y)
    with pytest.raises(TypeError, match=r"params\['0.bias'\] must be a floating point tensor, got float"):
        block_gradient(loss, {**params, "0.bias": 0.0}, x, y)


def test_a_parameter_that_is_read_behind_its_module_is_refused():
    (model, _, x, y, _), params = made(mlp)

    def decayed(prediction, y):
        return squares(prediction, y) + 0.1 * model[0].weight.square().sum()

    with pytest.raises(
        ValueError, match=r"loss_fn: reads the parameter '0.weight' by a reference of its own"
    ):
        block_gradient(chain(model, decayed), params, x, y)
    block_gradient(chain(model, decayed), {"4.weight": params["4.weight"]}, x, y)

    class Kept(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.kept = [self.weight]

        def forward(self, x):
            return F.linear(x, *self.kept)

    kept = nn.Sequential(Kept())
    with pytest.raises(
        ValueError, match=r"block '0': reads the parameter '0.weight' by a reference of its own"
    ):
        block_gradient(chain(kept, squares), dict(kept.named_parameters()), randn(1, 3).float(), randn(1, 2))


def test_a_block_that_writes_into_what_it_is_handed_is_refused():
    (model, loss_fn, x, y, _), params = made(mlp)
    loss = chain(model, loss_fn, blocks=list(model), example=x)
    with pytest.raises(ValueError, match=r"block '3': writes in place into its input.*inplace=False"):
        block_gradient(loss, params, x, y)


def test_a_loss_must_be_a_tensor_that_depends_on_the_parameters():
    (model, loss_fn, x, y, _), params = made(mlp)
    with pytest.raises(ValueError, match="the loss depends on none of the parameters"):
        block_gradient(chain(model, lambda p, y: loss_fn(p.detach(), y.detach())), params, x, y)
    with pytest.raises(ValueError, match="the loss depends on none of the parameters"):
        block_gradient(chain(model, lambda p, y: loss_fn(p.detach(), y)), params, x, y)
    with pytest.raises(TypeError, match="loss_fn must return one tensor, got tuple"):
        block_gradient(chain(model, lambda p, y: (loss_fn(p, y), p)), params, x, y)


def test_transforms_are_refused():
    (model, loss_fn, x, y, _), params = made(mlp)
    loss = chain(model, loss_fn)
    with pytest.raises(RuntimeError, match=r"inside a torch.func transform.*around the transform"):
        torch.func.vmap(lambda x: block_gradient(loss, params, x, y[0]).loss)(x.detach())
