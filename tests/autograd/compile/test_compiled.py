from __future__ import annotations

import functools
import gc
import warnings
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import metagrad as mg
from metagrad.autograd.compile.compiled import CompileOptions
from tests.marks import combined, fast, slow


def draw(*shape, seed=0, **how):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=how.pop("dtype", torch.float64), **how)


def descent(state, t, x, lr):
    """A step with a counter in its state, and a column of size 1, whose stride torch.compile would compare."""
    w, taken = state
    gradient, loss = torch.func.grad_and_value(lambda w: torch.tanh(x @ w).square().sum() + w.pow(4).sum())(w)
    return (w - lr / (1 + t) * gradient, taken + 1), loss


def gradients(order, steps=6, seed=0, step=descent, dtype=torch.float64, **how):
    w, x = draw(3, 1, seed=seed, dtype=dtype), draw(5, 3, seed=seed + 1, dtype=dtype)
    inputs = [leaf.requires_grad_() for leaf in (w, x, torch.tensor(0.05, dtype=dtype))]
    (last, taken), losses = mg.unroll(step, (w, 0), *inputs[1:], steps=steps, **how)
    assert taken == steps
    assert isinstance(taken, int)
    result = last.pow(3).sum() + losses.square().sum()
    for _ in range(order - 1):
        grads = torch.autograd.grad(result, inputs, create_graph=True, materialize_grads=True)
        assert how.get("truncate") or all(gradient.requires_grad for gradient in grads)
        result = torch.stack([gradient.pow(3).sum() for gradient in grads]).sum()
    return torch.autograd.grad(result, inputs, materialize_grads=True)


@pytest.mark.parametrize(
    ("memory", "truncate", "order"),
    combined(
        ["full", "step", "sqrt", "auto", 3000],
        [None, 3],
        [1, 2, 3],
        # With and without recomputation and truncation, and the third order, for which more is compiled.
        fast=lambda *values: (
            values in [("full", None, 2), ("step", None, 3), (3000, None, 1), ("step", 3, 1)]
        ),
    ),
)
def test_equals_the_eager_loop_at_every_order(memory, truncate, order):
    got = gradients(order, memory=memory, truncate=truncate, compile={"backend": "aot_eager"})
    torch.testing.assert_close(got, gradients(order, truncate=truncate), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("order", [slow(1), 2, slow(3)])
def test_one_graph_of_all_steps_equals_the_eager_loop(order):
    got = gradients(order, compile={"whole": True, "backend": "aot_eager"})
    torch.testing.assert_close(got, gradients(order), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("memory", [slow("full"), "step", slow("sqrt")])
def test_nothing_is_compiled_again_for_other_values_and_numbers_of_steps(memory):
    backend = CompileCounterWithBackend("aot_eager")
    gradients(1, memory=memory, compile={"backend": backend})
    compiled = backend.frame_count
    assert compiled > 0
    for steps, seed in ((1, 0), (5, 3), (17, 4)):
        got = gradients(1, steps=steps, seed=seed, memory=memory, compile={"backend": backend})
        torch.testing.assert_close(got, gradients(1, steps=steps, seed=seed), rtol=1e-10, atol=1e-14)
    assert backend.frame_count == compiled


def test_a_state_that_comes_back_in_another_layout_compiles_nothing_again():
    backend = CompileCounterWithBackend("aot_eager")
    w = draw(3, 2).requires_grad_()
    counts = []
    for steps in (1, 4, 4):
        last, _ = mg.unroll(
            lambda w, t: ((w * w).t().contiguous().t(), None),
            w,
            steps=steps,
            memory="step",
            compile={"backend": backend},
        )
        (gradient,) = torch.autograd.grad(last.sum(), w)
        torch.testing.assert_close(gradient, 2**steps * w.detach().pow(2**steps - 1))
        counts.append(backend.frame_count)
    assert counts == counts[:1] * 3


def test_floats_among_the_arguments_are_not_constants():
    backend = CompileCounterWithBackend("aot_eager")
    w, x = draw(3, 1).requires_grad_(), draw(5, 3)
    counts = []
    for lr in (0.1, 0.2, 0.3):
        (got, _), _ = mg.unroll(descent, (w, 0), x, lr, steps=3, compile={"backend": backend})
        (expected, _), _ = mg.unroll(descent, (w, 0), x, lr, steps=3)
        torch.testing.assert_close(got, expected)
        counts.append(backend.frame_count)
    assert counts == counts[:1] * 3


def scaled(w, t, *, by):
    return w * by, None


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, w, t):
        return w * self.by, None

    def method(self, w, t):
        return w * self.by, None


STEPS = {
    "closure": lambda by: lambda w, t: (w * by, None),
    "partial": lambda by: functools.partial(scaled, by=by),
    "callable object": Scaled,
    "method": lambda by: Scaled(by).method,
}


@pytest.mark.parametrize("kind", fast(("closure", "method"), STEPS))
@pytest.mark.parametrize("memory", ["full", slow("step")])
def test_what_a_step_holds_is_no_constant(kind, memory):
    for by in (2.0, 3.0, 4.0, torch.tensor(5.0), torch.tensor(6.0)):
        w = torch.ones(2, requires_grad=True)
        last, _ = mg.unroll(STEPS[kind](by), w, steps=2, memory=memory, compile={"backend": "eager"})
        (gradient,) = torch.autograd.grad(last.sum(), w)
        assert last.tolist() == gradient.tolist() == [float(by) ** 2] * 2


@pytest.mark.parametrize("memory", [slow("full"), "step"])
def test_what_a_step_closes_over_is_not_kept_alive(memory):
    def gone():
        model = torch.nn.Linear(3, 3).requires_grad_(False)

        def step(w, t):
            return w - 0.1 * torch.func.grad(lambda w: model(w).square().sum())(w), None

        last, _ = mg.unroll(
            step, torch.ones(2, 3, requires_grad=True), steps=2, memory=memory, compile={"backend": "eager"}
        )
        last.sum().backward()
        return [weakref.ref(held) for held in (model, model.weight, model.bias, step)]

    for _ in range(2):
        held = gone()
        gc.collect()
        assert [reference() for reference in held] == [None] * 4


def test_what_was_compiled_is_kept_for_a_bounded_number_of_steps():
    from metagrad.autograd.unrolling.unroll import _compiled_step

    most = _compiled_step.cache_info().maxsize
    assert most is not None
    for number in range(most + 2):
        _compiled_step(number, CompileOptions(False, {}))
    assert _compiled_step.cache_info().currsize == most


def test_constants_that_torch_cannot_make_variable_end_in_one_warning():
    def last(name):
        step = lambda w, t: (w * len(name), None)  # noqa: E731
        return mg.unroll(step, torch.ones(2), steps=2, compile={"backend": "eager"})[0].tolist()

    names = ["x" * length for length in range(1, 15)]
    with pytest.warns(UserWarning, match=r"again and again.*should be a tensor among its arg") as caught:
        assert [last(name) for name in names] == [[float(len(name) ** 2)] * 2 for name in names]
    assert len(caught) == 1


def test_options_reach_the_backend(monkeypatch):
    seen = []

    def backend(graph, inputs, **how):
        seen.append(how)
        return graph.forward

    def inductor(graph, inputs, config_patches, **how):
        seen.append(config_patches)
        return graph.forward

    def run(**options):
        mg.unroll(lambda w, t: (w + 1, None), torch.ones(2), steps=1, compile=options)

    run(backend=backend, mode="max-autotune", options={"fast": True}, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)
    run(mode="max-autotune-no-cudagraphs", options={"epilogue_fusion": False})
    assert seen[0] == {"mode": "max-autotune", "options": {"fast": True}}
    assert seen[1]["max_autotune"]
    assert not seen[1]["epilogue_fusion"]
    with pytest.raises(RuntimeError, match="Unexpected optimization option fast"):
        run(options={"fast": True})


def test_without_grad_mode_and_without_graphs():
    w, x = draw(3, 1).requires_grad_(), draw(5, 3)
    for how in ({"create_graph": False}, {}):
        with torch.set_grad_enabled(bool(how)):
            (got, _), losses = mg.unroll(
                descent, (w, 0), x, 0.1, steps=4, compile={"backend": "aot_eager"}, **how
            )
            (expected, _), _ = mg.unroll(descent, (w, 0), x, 0.1, steps=4, create_graph=False)
        torch.testing.assert_close(got.detach(), expected.detach())
        assert losses.shape == (4,)
        assert losses.grad_fn is None


def test_a_graph_is_walked_twice():
    for memory in ("full", "step"):
        w = draw(3, 1).requires_grad_()
        (last, _), _ = mg.unroll(
            descent, (w, 0), draw(5, 3), 0.1, steps=3, memory=memory, compile={"backend": "aot_eager"}
        )
        first = torch.autograd.grad(last.sum(), w, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(last.sum(), w), first, rtol=0, atol=0)


def test_a_structured_aux_and_an_integer_in_it():
    def step(w, t):
        return w * 2, {"seen": w, "number": t, "nothing": None}

    w = torch.ones(2, requires_grad=True)
    for memory in ("full", "step"):
        _, aux = mg.unroll(step, w, steps=3, memory=memory, compile={"backend": "aot_eager"})
        assert aux["number"].tolist() == [0, 1, 2]
        assert aux["nothing"] is None
        (gradient,) = torch.autograd.grad(aux["seen"].pow(2).sum(), w)
        assert gradient.tolist() == [42.0, 42.0]


def noisy(w, t):
    return w * torch.rand(2), None


def branching(w, t):
    gradient = torch.func.grad(lambda w: w.pow(2).sum() if w.sum() > 0 else w.pow(3).sum())(w)
    return w - 0.1 * gradient, None


def normalised(w, t):
    mean, variance = _RUNNING
    return torch.nn.functional.batch_norm(w, mean, variance, training=True), None


_RUNNING = torch.zeros(2), torch.ones(2)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (noisy, "random numbers are drawn"),
        (branching, "torch.compile cannot take it: .+: "),
        (normalised, "statistics"),
    ],
)
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(step, reason):
    options = {"backend": CompileCounterWithBackend("aot_eager")}

    def run(**how):
        torch.manual_seed(0)
        w = torch.tensor([[1.0, -3.0], [0.5, 2.0]], requires_grad=True)
        last, _ = mg.unroll(step, w, steps=2, **how)
        return last, torch.autograd.grad(last.pow(2).sum(), w)

    expected = run()
    before = [statistic.clone() for statistic in _RUNNING]
    run()
    moved = [statistic - b for statistic, b in zip(_RUNNING, before, strict=True)]
    for statistic, b in zip(_RUNNING, before, strict=True):
        statistic.copy_(b)
    with pytest.warns(UserWarning, match=f"without being compiled, because .*{reason}"):
        got = run(compile=options)
    with torch.autograd.graph.save_on_cpu():
        """Tracing that fails must not leave saved-tensor hooks disabled."""
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close([s - b for s, b in zip(_RUNNING, before, strict=True)], moved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(run(compile=options), expected)


def decaying(state, t):
    w, lr = state
    return (w - lr * w, lr / 2), None


def alternating(state, t):
    w, is_even = state
    return (w * 2 if is_even else w + 1, not is_even), None


class Plain:
    """An object that is no tree."""

    def __init__(self, w):
        self.w = w


def in_an_object(state, t):
    return Plain(state.w * 2), None


@pytest.mark.parametrize("whole", [False, True], ids=["steps", "whole"])
@pytest.mark.parametrize(
    ("step", "state", "reason"),
    [
        (decaying, lambda w: (w, 0.5), r"state\[1\], a constant of type float, is another after a step"),
        (alternating, lambda w: (w, True), r"state\[1\], a constant of type bool"),
        (in_an_object, Plain, "state, a constant of type Plain"),
    ],
    ids=["float", "bool", "object"],
)
def test_constants_of_a_state_that_change_are_not_taken_for_the_first(step, state, reason, whole):
    def run(**how):
        last, _ = mg.unroll(step, state(torch.tensor([1.0, 3.0])), steps=4, **how)
        w, other = (last.w, None) if isinstance(last, Plain) else last
        return w.tolist(), other

    mg.autograd.unrolling.unroll._compiled_step.cache_clear()
    with pytest.warns(UserWarning, match=reason):
        assert run(compile={"backend": "eager", "whole": whole}) == run()


def test_constants_of_a_state_that_stay_are_compiled():
    options = {"backend": CompileCounterWithBackend("eager")}
    state = (torch.tensor([1.0, 3.0]), True, 0.5, "name")
    last, _ = mg.unroll(
        lambda s, t: ((s[0] * s[2], bool(s[1]), s[2], s[3]), None), state, steps=2, compile=options
    )
    assert last[0].tolist() == [0.25, 0.75]
    assert last[1:] == (True, 0.5, "name")
    assert last[1] is True
    assert options["backend"].frame_count


def test_a_list_among_the_arguments_is_appended_to():
    def step(w, t, seen):
        seen.append(w)
        return w * 2, None

    seen: list[torch.Tensor] = []
    with pytest.warns(UserWarning, match="a list or dict among the arguments is changed"):
        mg.unroll(step, torch.tensor(1.0), seen, steps=3, compile={"backend": "eager"})
    assert [w.item() for w in seen] == [1.0, 2.0, 4.0]


def test_the_check_before_compiling_draws_nothing_from_a_generator_that_is_handed_over():
    def run(**how):
        generator = torch.Generator().manual_seed(0)
        w = torch.ones(2, requires_grad=True)
        last, _ = mg.unroll(lambda w, t: (w * torch.rand(2, generator=generator), None), w, steps=2, **how)
        return last

    with pytest.warns(UserWarning, match="random numbers are drawn"):
        got = run(compile={"backend": "eager"})
    assert got.tolist() == run().tolist()


def test_a_free_tensor_that_requires_grad_is_refused():
    scale = torch.tensor(2.0, requires_grad=True)
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"requires grad is read without being an argument.*Pass it as an arg"
    ):
        mg.unroll(lambda w, t: (w * scale, None), w, steps=2, compile={"backend": "aot_eager"})


def test_a_free_tensor_is_refused_also_where_it_only_later_requires_grad():
    scale = torch.tensor(2.0)

    def step(w, t):
        return w * scale, None

    w = torch.ones(2, requires_grad=True)
    mg.unroll(step, w, steps=2, compile={"backend": "aot_eager"})
    scale.requires_grad_()
    with pytest.raises(ValueError, match="Pass it as an argument"):
        mg.unroll(step, w, steps=2, compile={"backend": "aot_eager"})


def test_a_free_tensor_must_not_change_before_it_is_read_again():
    scale = torch.tensor(2.0)
    w = torch.ones(2, requires_grad=True)
    last, _ = mg.unroll(
        lambda w, t: (w * scale, None), w, steps=2, memory="step", compile={"backend": "aot_eager"}
    )
    scale.add_(1)
    with pytest.raises(RuntimeError, match="modified in place between the forward pass"):
        last.sum().backward()


def test_a_free_tensor_may_change_between_loops():
    scale, w = torch.tensor(2.0), torch.ones(2, requires_grad=True)

    def step(w, t):
        return w * scale, None

    for by in (2.0, 3.0):
        last, _ = mg.unroll(step, w, steps=2, memory="step", compile={"backend": "eager"})
        scale.add_(0)
        last, _ = mg.unroll(step, w, steps=2, memory="step", compile={"backend": "eager"})
        assert torch.autograd.grad(last.sum(), w)[0].tolist() == [by**2] * 2
        scale.add_(1)


def test_the_free_tensor_of_another_closure_must_not_change_either():
    def made(scale):
        return lambda w, t: (w * scale, None)

    w, scales = torch.ones(2, requires_grad=True), [torch.tensor(2.0), torch.tensor(3.0)]
    for scale in scales:
        last, _ = mg.unroll(made(scale), w, steps=2, memory="step", compile={"backend": "eager"})
    scales[1].add_(1)
    with pytest.raises(RuntimeError, match="modified in place between the forward pass"):
        last.sum().backward()


def test_inside_a_transform_it_runs_as_it_is():
    def loss(w):
        return mg.unroll(lambda w, t: (w * w, None), w, steps=2, compile={"backend": "eager"})[0].sum()

    with pytest.warns(UserWarning, match=r"inside a torch\.func transform"):
        assert torch.func.grad(loss)(torch.tensor([2.0])).item() == 32.0


def test_errors_of_the_step_are_its_own():
    with pytest.raises(ValueError, match="step must return"):
        mg.unroll(lambda w, t: w, torch.ones(2), steps=2, compile={"backend": "eager"})
    with pytest.raises(ValueError, match="must keep shapes and dtypes"):
        mg.unroll(lambda w, t: (w.double(), None), torch.ones(2), steps=2, compile={"backend": "eager"})
    with pytest.raises(ValueError, match="of the structure it takes"):
        mg.unroll(lambda w, t: ((w, w), None), torch.ones(2), steps=2, compile={"backend": "eager"})


@pytest.mark.parametrize("compile", ["full", 1.5, {"fullgraph": True}, {"whole": 3}])
def test_options_that_mean_nothing(compile):
    with pytest.raises(ValueError, match=r"unroll\(...\): compile m"):
        mg.unroll(descent, torch.ones(2), steps=1, compile=compile)


def test_one_graph_keeps_everything():
    with pytest.raises(ValueError, match=r'compile="whole".*got memory=.step'):
        mg.unroll(descent, torch.ones(2), steps=1, memory="step", compile="whole")


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["full", "step"])
def test_by_inductor(memory):
    got = gradients(2, memory=memory, compile=True)
    torch.testing.assert_close(got, gradients(2), rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_one_graph_by_inductor():
    torch.testing.assert_close(gradients(2, compile="whole"), gradients(2), rtol=1e-10, atol=1e-14)


class Switched(torch.nn.Module):
    """A layer whose value depends on its flag, on a number and on a buffer."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.scale = 2.0
        self.register_buffer("mean", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        y = self.linear(x).tanh() * self.mean
        return y * self.scale if self.training else y.sin()


def derivative_after(meddle, order, memory, **how):
    """Differentiate a loop of a module that is meddled with once the loop has run."""
    model, x = Switched(), draw(3).requires_grad_()
    with torch.no_grad():
        model.linear.weight.copy_(draw(3, 3, seed=1))
        model.linear.bias.zero_()
    weights = dict(model.named_parameters())

    def step(s, t, weights):
        return 0.5 * s + torch.func.functional_call(model, weights, (s,)), None

    y, _ = mg.unroll(step, x, weights, steps=4, memory=memory, **how)
    meddle(model)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=order == 2)
    return g if order == 1 else torch.autograd.grad(g.square().sum(), x)[0]


MEDDLING = {
    "flag": torch.nn.Module.eval,
    "number": lambda model: setattr(model, "scale", 3.0),
    "buffer bound anew": lambda model: setattr(model, "mean", model.mean * 5),
}


@pytest.mark.parametrize("memory", [slow("full"), "step", slow("sqrt")])
def test_modules_that_change_after_a_compiled_loop_change_no_derivative(memory):
    how = {"compile": {"backend": "eager"}}
    for order in (1, 2):
        expected = derivative_after(lambda model: None, order, "full")
        for meddle in MEDDLING.values():
            got = derivative_after(meddle, order, memory, **how)
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
        with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
            derivative_after(lambda model: model.mean.mul_(2), order, memory, **how)
