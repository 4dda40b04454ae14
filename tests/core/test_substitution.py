"""Modules that run again in a backward pass use the weights of the call, or an error names the module."""

import contextlib
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrize import register_parametrization
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import metagrad as mg

sgd = mg.optim.rules.sgd


class Blocks(nn.Module):
    """A sequence of blocks, each called by ``through``."""

    def __init__(self, *blocks, through=None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.through = through or (lambda block, x: block(x))

    def forward(self, x):
        for block in self.blocks:
            x = self.through(block, x)
        return x.reshape(len(x), -1)[:, :2]


class Gated(nn.Module):
    """A module with layers in a plain list, and with an assigned ``forward``, as in Hugging Face Accelerate."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.layers = [self.first, self.second]
        self.forward = functools.partial(Gated.run, self)

    def run(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


class Last(nn.Module):
    """A module that returns the last output of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class Counted(nn.Linear):
    """A layer that counts its calls."""

    def __init__(self):
        super().__init__(3, 3)
        self.calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x).sin()


class Reversed(torch.autograd.Function):
    """A Function that calls a block in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.block = block
        ctx.save_for_backward(x, *weights)
        return block(x)

    @staticmethod
    def backward(ctx, cotangent):
        x, *weights = ctx.saved_tensors
        graph = {"create_graph": torch.is_grad_enabled(), "retain_graph": True}
        with torch.enable_grad():
            own = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
            y = ctx.block(own)
        grads = torch.autograd.grad(y, (own, *weights), cotangent, **graph)
        return None, *grads


def reversed_(block, x):
    return Reversed.apply(block, x, *block.parameters())


def again(block, x):
    return checkpoint(block, x, use_reentrant=False)


MODELS = {
    "layers": lambda: [nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Linear(5, 2)],
    "norms": lambda: [nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU()), nn.Linear(4, 2)],
    "convolutions": lambda: [nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.GroupNorm(1, 2), nn.Softplus()],
    "attention": lambda: [
        nn.Unflatten(1, (3, 1)),
        nn.TransformerEncoderLayer(1, 1, 4, 0.0, batch_first=True),
    ],
    "recurrent": lambda: [nn.Unflatten(1, (3, 1)), Last(nn.GRU(1, 2, batch_first=True))],
    "tied": lambda: [layer := nn.Sequential(nn.Linear(3, 3), nn.Tanh()), layer],
    "dropout": lambda: [nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)],
    "parametrized": lambda: [register_parametrization(nn.Linear(3, 3), "weight", nn.Tanh()), nn.Tanh()],
    "held elsewhere": lambda: [Gated(), nn.Tanh()],
    "counted": lambda: [Counted(), Counted()],
    "nested": lambda: [Blocks(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), through=again), nn.Linear(2, 2)],
}
WAYS = {
    "full": {"memory": "full"},
    "step": {"memory": "step"},
    "loop": {"task_chunk": 1, "memory": "sqrt"},
    "first order": {"order": 1},
    "implicit": {"kind": functools.partial(mg.iMAML, hypergradient=mg.hypergrad.CG(steps=5, damping=9.0))},
    "reptile": {"kind": mg.Reptile},
}


def batch():
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 4, 3, dtype=torch.float64), torch.randn(2, 2, 4, 2, dtype=torch.float64)
    return (x[0], y[0]), (x[1], y[1])


def meta_gradient(model, kind=mg.MAML, **arguments):
    maml = kind(model, F.mse_loss, inner=sgd(lr=0.3), steps=2, **arguments)
    torch.manual_seed(1)
    loss = maml(batch()).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.mark.filterwarnings(
    "ignore:.*run one by one:UserWarning",
    "ignore:iMAML.*left a residual:UserWarning",
    "ignore:.*preflight:UserWarning",
)
@pytest.mark.parametrize(
    ("name", "through"), [*((name, again) for name in MODELS), ("layers", reversed_), ("norms", reversed_)]
)
def test_blocks_that_run_again(name, through):
    model = Blocks(*MODELS[name]()).double()
    for way, arguments in WAYS.items():
        arguments = arguments if name != "dropout" else {**arguments, "task_chunk": 1}
        model.through = lambda block, x: block(x)
        expected = meta_gradient(model, **arguments)
        model.through = through
        calls = getattr(model.blocks[0], "calls", -1)
        assert_close(meta_gradient(model, **arguments), expected, rtol=1e-9, atol=1e-12, msg=way.__add__)
        assert getattr(model.blocks[0], "calls", 0) > calls
        assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*runs without being compiled:UserWarning")
def test_adapted_models_and_compiled_ones():
    model = Blocks(*MODELS["layers"](), through=again).double()
    with pytest.warns(UserWarning, match=r"because Linear \(blocks\..*\) runs again in the backward pass"):
        found = meta_gradient(model, compile=True)
    model.through = lambda block, x: block(x)
    assert_close(found, meta_gradient(model, task_chunk=1))
    gradients = []
    for model.through in (lambda block, x: block(x), again):
        maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.3), steps=2, task_chunk=1)
        support, (x, _) = batch()
        adapted = maml.adapt(support)(x)
        gradients.append(torch.autograd.grad(adapted.sin().sum(), list(model.parameters())))
    assert_close(*gradients)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def hidden(block, x):
    return Reversed.apply(block, x) if x.requires_grad else block(x)


def held_by_a_hook(block, x):
    y = block(x)
    if getattr(block, "in_features", 0) == 3:
        y.register_hook(lambda gradient: gradient * HELD[0](x).sum().exp())
    return y


HELD = []


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    ("through", "norm", "message"),
    [
        (reentrant, None, r"use_reentrant=True\) around Linear \(blocks\.\d\).*metagrad\.checkpoint"),
        (hidden, None, r"Function.* calls Linear \(blocks\.\d\) and gives no gradient.*metagrad\.checkpoint"),
        (held_by_a_hook, None, r"Linear \(blocks\.\d\) runs again.*holds the module itself"),
        (again, "transductive", r"norm\): \w+ \(blocks\.\d\) runs again.*metagrad\.checkpoint"),
    ],
)
def test_errors(through, norm, message):
    layers = [nn.Linear(3, 5), nn.Tanh() if norm is None else nn.BatchNorm1d(5), nn.Linear(5, 2)]
    HELD[:] = layers
    model = Blocks(*layers, through=through).double()
    with pytest.raises(ValueError, match=message):
        meta_gradient(model, norm=norm)


def trained(model, memory, *params):
    """Return the last loss of a few steps from some parameters."""
    (x, y), _ = batch()

    def step(params, t):
        loss = F.mse_loss(functional_call(model, params, (x[0],)), y[0])
        grads = mg.grad(loss, params, create_graph=True)
        return {name: p - 0.3 * grads[name] for name, p in params.items()}, loss

    state = dict(zip(dict(model.named_parameters()), params, strict=True))
    return mg.unroll(step, state, steps=3, memory=memory)[1][-1]


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.parametrize("through", [again, reversed_, mg.checkpoint])
def test_modules_of_a_step_that_the_user_writes(through, memory):
    """``torch.func.functional_call`` substitutes parameters only during the forward pass."""
    model = Blocks(nn.Linear(3, 5), nn.Linear(5, 2), through=through).double()

    def last_loss():
        return torch.autograd.grad(trained(model, memory, *model.parameters()), list(model.parameters()))

    if through is mg.checkpoint:
        found, model.through = last_loss(), lambda block, x: block(x)
        assert_close(found, last_loss())
    else:
        with pytest.raises(
            RuntimeError, match=r"unroll\(step, \.\.\.\): Linear runs again.*metagrad\.checkpoint"
        ):
            last_loss()


@pytest.mark.parametrize("memory", ["full", "step", "sqrt"])
def test_a_checkpoint_around_a_whole_loop(memory):
    """It repeats the loop, which puts the parameters of each step into the model again."""
    model = Blocks(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    params = list(model.parameters())
    loss = checkpoint(functools.partial(trained, model, memory), *params, use_reentrant=False)
    assert_close(
        torch.autograd.grad(loss, params), torch.autograd.grad(trained(model, "full", *params), params)
    )


def response(loss, params, data):
    """Return the derivative of a minimum with respect to the weight of its penalty."""
    weight = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    found = mg.hypergrad.implicit_diff(
        lambda p: loss(p, *data) + weight * sum(v.square().sum() for v in p.values()),
        params,
        method=mg.hypergrad.CG(steps=50),
    )
    return torch.autograd.grad(sum(p.sum() for p in found.values()), weight)


CURVED = {
    "hessian": lambda loss, p, model, data: mg.hessian(loss, p, data).to_dense(),
    "hvp": lambda loss, p, model, data: list(mg.hvp(lambda p: loss(p, *data), p, p).product.values()),
    "ggn": lambda loss, p, model, data: mg.ggn(model, F.mse_loss, p, data).to_dense(),
    "fisher": lambda loss, p, model, data: mg.fisher(model, F.mse_loss, p, data).to_dense(),
    "kfac": lambda loss, p, model, data: mg.kfac(model, F.mse_loss, p, data).to_dense(),
    "hypergradient": lambda loss, p, model, data: mg.hypergradient(
        lambda p, c: loss(p, *data),
        lambda p, c: loss(p, *data) + c * sum(v.square().sum() for v in p.values()),
        p,
        torch.tensor(9.0, dtype=torch.float64),
    ),
    "implicit_diff": lambda loss, p, model, data: response(loss, p, data),
    "fixed_point": lambda loss, p, model, data: list(
        mg.hypergrad.fixed_point(lambda p: {k: p[k] / 2 + loss(p, *data) / 9 for k in p}, p).value.values()
    ),
}


@pytest.mark.parametrize(
    ("name", "through"),
    [*((name, again) for name in CURVED), *((name, mg.checkpoint) for name in CURVED if name != "kfac")],
)
def test_curvature_at_other_parameters_than_those_of_the_module(name, through):
    model = Blocks(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), through=through).double()
    (x, y), _ = batch()
    params = {name: 1.5 * p.detach() for name, p in model.named_parameters()}

    def found():
        return CURVED[name](
            lambda p, x, y: F.mse_loss(functional_call(model, p, (x,)), y), params, model, (x[0], y[0])
        )

    if through is again:
        with pytest.raises(RuntimeError, match=rf"{name}.*Linear runs again.*metagrad\.checkpoint"):
            found()
        return
    result, model.through = found(), lambda block, x: block(x)
    assert_close(result, found())


def test_two_threads_in_one_model():
    """The second thread raises an error, and the original weights are restored."""
    inside, done, errors = threading.Event(), threading.Event(), []

    def wait(block, x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            done.wait(20)
        return block(x)

    model = Blocks(nn.Linear(3, 2), through=wait).double()

    def other():
        with contextlib.suppress(BaseException):
            meta_gradient(model, task_chunk=1)
            errors.append(None)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(20)
    before = dict(model.named_parameters())
    try:
        for call in (lambda: meta_gradient(model, task_chunk=1), lambda: product(model)):
            with pytest.raises(RuntimeError, match=r"another thread computes with this model.*deepcopy"):
                call()
    finally:
        done.set()
        thread.join()
    assert errors == [None]
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert before
    meta_gradient(model, task_chunk=1)


def product(model):
    (x, y), _ = batch()
    params = dict(model.named_parameters())
    with mg.ggn(model, F.mse_loss, params, (x[0], y[0])) as operator:
        return operator @ params
