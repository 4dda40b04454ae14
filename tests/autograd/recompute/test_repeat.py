"""A recomputation repeats the call or raises an error. It leaves no trace and loses no gradient."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import metagrad as mg

pytestmark = pytest.mark.filterwarnings("ignore:.*running statistics:UserWarning")

MEMORIES = ["step", "sqrt"]


def penalised(x: Tensor, found: dict) -> Tensor:
    """Append to a list and set an entry of a dict. Both are arguments."""
    found["penalties"].append(x.pow(3).sum())
    found["last"] = x
    return x * 2


class Model(nn.Module):
    """A layer, and everything else that a model can hold."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.baseline = 0, 1.0
        self.penalties: list[Tensor] = []
        self.seen: Tensor | None = None

    def forward(self, x):
        return self.linear(x).tanh()


class PythonNumbers(Model):
    def forward(self, x):
        return super().forward(x) * (1 + random.random() + random.gauss(0, 1))


class NumpyNumbers(Model):
    def forward(self, x):
        return super().forward(x) * (1 + np.random.rand() + torch.from_numpy(np.random.randn(4)))


class Dropout(Model):
    def forward(self, x):
        return self.dropout(super().forward(x))


class Counter(Model):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Baseline(Model):
    def forward(self, x):
        y = super().forward(x)
        self.baseline = 0.9 * self.baseline + 0.1 * y.sum().item()
        return y * self.baseline


class Rebound(Model):
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x) * self.mean


class ThroughData(Model):
    def forward(self, x):
        self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        self.count.data += 1
        return super().forward(x) * self.mean.clone() + self.count.clone()


class BatchNorm(Model):
    def forward(self, x):
        return self.norm(super().forward(x))


class SpectralNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Penalties(Model):
    def forward(self, x):
        y = super().forward(x)
        self.penalties.append(y.pow(4).mean())
        return y


class Attribute(Model):
    def forward(self, x):
        y = super().forward(x)
        self.seen = y.pow(4).mean()
        return y


MODELS = [
    PythonNumbers,
    NumpyNumbers,
    Dropout,
    Counter,
    Baseline,
    Rebound,
    ThroughData,
    BatchNorm,
    SpectralNorm,
    Penalties,
    Attribute,
]


def unrolled(model: nn.Module, x: Tensor, memory: str) -> Tensor:
    return mg.unroll(lambda s, t: (0.5 * s + model(s), None), x, steps=4, memory=memory)[0]


FORMS = {
    **{memory: lambda model, x, memory=memory: unrolled(model, x, memory) for memory in [*MEMORIES, "8KiB"]},
    "in a checkpoint": lambda model, x: mg.checkpoint(lambda x: mg.checkpoint(model, x), x),
    "in a segment": lambda model, x: unrolled(lambda s: mg.checkpoint(model, s), x, "sqrt"),  # type: ignore[arg-type]
}


def outcome(model_type: type[Model], run) -> list:
    """Return first and second derivatives, and what a model and the generators are afterwards."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    model = model_type().double()
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    loss = run(model, x).pow(2).sum() + sum(model.penalties)
    loss = loss if model.seen is None else loss + model.seen
    inputs = [x, *model.linear.parameters()]
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(torch.cat([g.pow(2).flatten() for g in first]).sum(), inputs)
    numbers = [model.calls, model.baseline, len(model.penalties), random.random(), np.random.randn()]
    drawn = torch.rand(1, dtype=torch.float64)
    buffers = [buffer.double() for buffer in model.buffers()]
    return [*first, *second, *buffers, drawn, torch.tensor(numbers, dtype=torch.float64)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_type", MODELS, ids=lambda m: m.__name__)
def test_derivatives_and_everything_left_behind_equal_those_of_the_plain_call(model_type, form):
    plain = (
        (lambda model, x: model(x)) if "checkpoint" in form else (lambda model, x: unrolled(model, x, "full"))
    )
    for got, expected in zip(outcome(model_type, FORMS[form]), outcome(model_type, plain), strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9 * (scale + 1))


@pytest.mark.parametrize("memory", MEMORIES)
def test_flags_and_numbers_that_change_before_the_backward_pass_change_nothing(memory):
    def gradient(memory, meddle):
        torch.manual_seed(0)
        model = Dropout().double()
        x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
        last = unrolled(model, x, memory)
        meddle(model)
        return torch.autograd.grad(last.sum(), x)[0]

    expected = gradient("full", lambda model: None)
    for meddle in (nn.Module.eval, lambda model: setattr(model.dropout, "p", 0.9)):
        torch.testing.assert_close(gradient(memory, meddle), expected, rtol=1e-12, atol=1e-14)


def test_settings_of_torch_that_change_before_the_backward_pass_change_nothing():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    seen = []

    def scaled(x):
        seen.append(
            (torch.get_default_dtype(), torch.backends.cuda.math_sdp_enabled(), torch.get_default_device())
        )
        return x * torch.full((3,), 1 / 3)

    torch.set_default_dtype(torch.float64)
    try:
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
            y = mg.checkpoint(scaled, x)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert seen == [(torch.float64, False, torch.device("cpu"))] * 2
    assert torch.get_default_dtype() == torch.float32
    assert torch.backends.cuda.math_sdp_enabled()


class Scaled(torch.autograd.Function):
    """An identity that scales gradients."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


class Hidden(torch.autograd.Function):
    """A product with an array that no torch function sees."""

    @staticmethod
    def forward(ctx, x, array):
        ctx.array = array
        return x * float(array[0])

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float(ctx.array[0]), None


def fickle_functions():
    """Functions that change with each call for a reason that no recording sees."""
    count, array = iter(range(1, 100)), np.ones(2**15)
    graph = "other operations are differentiable than were"
    values = r"a result of shape \(3,\) has other values"
    shared = torch.from_numpy(array)

    def writes_by_numpy(x):
        array[:] += 1
        return x * shared.sum()

    def switched(x):
        with torch.set_grad_enabled(next(count) % 2 == 1):
            y = x.sin()
        return x + y

    return {
        "number": (lambda x: x * next(count), values),
        "array": (lambda x: x * torch.tensor(np.arange(3) + next(count)), values),
        "branch": (lambda x: x.sin() if next(count) == 1 else x.cos(), values),
        "an operation that changes no value": (
            lambda x: x.sin() if next(count) == 1 else x.sin() * 1,
            graph,
        ),
        "grad mode": (switched, graph),
        "detached": (
            lambda x: x + (x if next(count) == 1 else x.detach().clone()),
            "gradient|differentiable",
        ),
        "backward": (lambda x: Scaled.apply(x, next(count)), "custom autograd.Function kept other numbers"),
        "custom function": (
            lambda x: Hidden.apply(x, array.__iadd__(1)),
            values,
        ),
        "memory shared with NumPy": (writes_by_numpy, values),
    }


@pytest.mark.parametrize(("form", "order"), [("checkpoint", 1), ("checkpoint", 2), ("sqrt", 1)])
@pytest.mark.parametrize("case", fickle_functions())
def test_what_does_not_repeat_is_an_error_that_says_what_differs(case, form, order):
    function, message = fickle_functions()[case]
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    if form == "checkpoint":
        y, name = mg.checkpoint(function, x), r"checkpoint\(fn, ...\)"
    else:
        y, name = (
            mg.unroll(lambda s, t: (function(s), None), x, steps=5, memory=form)[0],
            r"unroll\(step, ...\)",
        )
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*({message if form == 'checkpoint' else ''})"):
        torch.autograd.grad(y.sum(), x, create_graph=order == 2)


def test_the_step_that_does_not_repeat_is_named():
    count = iter(range(1, 100))
    x = torch.ones(3, requires_grad=True)
    y, _ = mg.unroll(lambda s, t: (s * (t + 1 if t < 2 else next(count)), None), x, steps=3, memory="step")
    with pytest.raises(RuntimeError, match=r"at t=2: .*other values"):
        y.sum().backward()


def test_a_gradient_that_does_not_repeat_at_second_order_is_an_error():
    factor = [1.0]

    def hooked(x):
        y = x * x
        y.register_hook(lambda g: g * factor[0])
        return y

    x = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad(mg.checkpoint(hooked, x).sum(), x, create_graph=True)
    factor[0] = 2.0
    with pytest.raises(RuntimeError, match="A gradient did not repeat when it was recomputed"):
        torch.autograd.grad(g.sum(), x)


def test_one_of_very_many_entries_is_compared():
    many = np.ones(2**15)
    shared, x = torch.from_numpy(many), torch.ones(2**15, dtype=torch.float64, requires_grad=True)
    y = mg.checkpoint(lambda x: x * shared, x)
    many[5] = 3.0
    with pytest.raises(RuntimeError, match=r"a result of shape \(32768,\) has other values"):
        y.sum().backward()


def test_writing_into_a_tensor_that_requires_grad_is_refused():
    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

    def fn(x, write):
        y = x * w
        write(w).mul_(2)
        return y

    with pytest.raises(ValueError, match=r"shape \(3,\) that requires grad and writes into it in place"):
        mg.checkpoint(fn, x, torch.Tensor.detach)
    with pytest.raises(ValueError, match="writes in place into one of its arguments"):
        mg.checkpoint(lambda x: (x * 1, x.detach().mul_(2))[0], x)
    y = mg.checkpoint(fn, x, lambda w: w.data)
    with pytest.raises(RuntimeError, match="has other values"):
        y.sum().backward()


def test_inference_tensors():
    x = torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        c = torch.randn(3)
    for y in (mg.checkpoint(lambda x: x + c, x), mg.checkpoint(torch.add, x, c)):
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones(3))


def doubled(form, x):
    if form == "checkpoint":
        return mg.checkpoint(lambda x: x.sin() * x, x).sum()
    return mg.unroll(lambda s, t: (s.sin() * s, None), x, steps=1, memory=form)[0].sum()


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "grad": lambda f, x: torch.func.grad(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.vmap(f)(x),
}


@pytest.mark.parametrize("form", ["checkpoint", "sqrt"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_over_recomputation_are_right_and_say_that_graphs_are_stored(transform, form):
    x = torch.randn(3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="inside a torch.func transform, where nothing can be recomputed"):
        got = TRANSFORMS[transform](lambda x: doubled(form, x), x)
    expected = TRANSFORMS[transform](lambda x: (x.sin() * x).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", ["checkpoint", *MEMORIES])
def test_dual_numbers_pass_and_say_that_graphs_are_stored(form):
    x, v = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        with pytest.warns(UserWarning, match="inside forward-mode differentiation"):
            y = doubled(form, dual)
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(tangent, (v * (x.cos() * x + x.sin())).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["checkpoint", "step", "sqrt"])
def test_cotangents_in_batches(form):
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def f(x):
        if form == "checkpoint":
            return mg.checkpoint(lambda x: x.sin() * x, x)
        return mg.unroll(lambda s, t: (s.sin() * s, None), x, steps=1, memory=form)[0]

    got = torch.autograd.functional.jacobian(f, x, vectorize=True)
    torch.testing.assert_close(got, torch.diag(x.cos() * x + x.sin()).detach(), rtol=1e-12, atol=1e-14)


def test_a_gradient_that_is_zero_to_rounding_may_round_otherwise():
    """An example is the gradient of a bias before batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.SiLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    params, x = list(model.parameters()), torch.randn(6, 1, 3, 3, dtype=torch.float64)

    def second(call):
        grads = torch.autograd.grad(call(model, x).square().mean(), params, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), params, materialize_grads=True)

    torch.testing.assert_close(second(mg.checkpoint), second(lambda model, x: model(x)))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_a_call_does_to_lists_and_dicts_among_its_arguments_is_done_to_those_of_the_caller(depth):
    call = penalised
    for _ in range(depth):
        call = functools.partial(mg.checkpoint, call)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    penalties: list[Tensor] = []
    found = {"penalties": penalties}
    y = call(x, found)
    assert found["penalties"] is penalties
    loss = y.sum() + penalties[0] + found["last"].pow(2).sum()  # type: ignore[attr-defined]
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    assert g.tolist() == [2 + 3 + 2, 2 + 12 + 4]
    assert torch.autograd.grad(g.sum(), x)[0].tolist() == [6 + 2, 12 + 2]
    assert len(penalties) == 1


@pytest.mark.parametrize("memory", ["full", *MEMORIES, "1MiB"])
def test_steps_change_one_list_and_one_state_as_a_plain_loop_does(memory):
    def step(state, t, found):
        state["w"] = penalised(state["w"], found)
        return state, None

    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    found: dict = {"penalties": []}
    last, _ = mg.unroll(step, {"w": x}, found, steps=4, memory=memory)
    assert last["w"].tolist() == [16.0, 32.0]
    penalties = torch.tensor([9.0 * 8**t for t in range(4)], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(found["penalties"]), penalties)
    (g,) = torch.autograd.grad(sum(found["penalties"]), x)
    torch.testing.assert_close(g, torch.tensor([3.0, 12.0], dtype=torch.float64) * (1 + 8 + 64 + 512))
