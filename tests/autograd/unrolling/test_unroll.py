import contextlib
import functools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import metagrad as mg
from tests.draws import leaf

MEMORIES = ["full", "step", "sqrt", "log", 1800, "1MiB"]


def problem():
    """State, arguments and a step of gradient descent with a closure, on a loss without symmetries."""
    state = {"a": leaf(2, 4), "b": leaf(3, seed=1)}
    lr, w = torch.tensor(0.1, dtype=torch.float64, requires_grad=True), leaf(4, 4, seed=2)

    def step(state, t, lr):
        loss = ((state["a"] @ w).tanh() ** 2).sum() + state["b"].pow(4).sum() + 0.01 * t * state["b"].sum()
        grads = mg.grad(loss, state, create_graph=True)
        return {k: state[k] - lr * grads[k] for k in state}, {"loss": loss, "seen": (state["b"] * 2, None)}

    return step, state, lr, w


def objective(memory, step, state, lr, steps=4) -> Tensor:
    last, aux = mg.unroll(step, state, lr, steps=steps, memory=memory)
    return (
        (last["a"] ** 2).sum()
        + last["b"].sin().sum()
        + (aux["loss"] ** 2).sum()
        + aux["seen"][0].pow(3).sum()
    )


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_memory_equals_full_at_three_orders_with_respect_to_state_arguments_and_closure(steps):
    step, state, lr, w = problem()
    inputs = [state["a"], state["b"], lr, w]
    results = []
    for memory in MEMORIES:
        loss = objective(memory, step, state, lr, steps)
        values = [loss]
        for _ in range(3):
            grads = torch.autograd.grad(loss, inputs, create_graph=True)
            assert all(g.requires_grad for g in grads)
            values += grads
            loss = loss + sum((g**2 + g).sum() for g in grads)
        results.append(values)
    for full, *others in zip(*results, strict=True):
        for other in others:
            torch.testing.assert_close(other, full, rtol=1e-12, atol=1e-12 * float(full.detach().abs().max()))


@pytest.mark.parametrize("memory", MEMORIES)
def test_gradient_descent_on_a_quadratic_has_its_closed_form(memory):
    """The last state is ``w (1 - lr)^T``."""
    w, lr = torch.tensor(2.0, requires_grad=True), torch.tensor(0.5, requires_grad=True)

    def step(w, t, lr):
        return w - lr * mg.grad(w**2 / 2, w, create_graph=True), w

    last, seen = mg.unroll(step, w, lr, steps=4, memory=memory)
    first = mg.grad(last, lr, create_graph=True)
    assert last.item() == 2 * 0.5**4
    assert seen.tolist() == [2.0, 1.0, 0.5, 0.25]
    assert first.item() == -4 * 2 * 0.5**3
    assert mg.grad(first, lr).item() == 4 * 3 * 2 * 0.5**2


@pytest.mark.parametrize("memory", ["full", "step"])
def test_steps_zero_returns_the_state_and_no_aux(memory):
    x = leaf(3)
    state, aux = mg.unroll(lambda x, t: (x, x), {"x": x}, steps=0, memory=memory)
    assert state["x"] is x
    assert aux is None


@pytest.mark.parametrize("memory", MEMORIES)
def test_constants_in_the_state_and_integer_aux(memory):
    def step(state, t):
        return {"x": state["x"] ** 2, "count": state["count"] + 1, "none": None}, torch.tensor(t)

    state, aux = mg.unroll(step, {"x": leaf(2), "count": 0, "none": None}, steps=3, memory=memory)
    assert state["count"] == 3
    assert aux.tolist() == [0, 1, 2]
    assert state["x"].requires_grad


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("no_grad", [True, False])
def test_without_create_graph_the_loop_runs_and_keeps_nothing(memory, no_grad):
    w = leaf(3)

    def step(w, t):
        loss = (w**4).sum()
        return w - 0.01 * mg.grad(loss, w), loss

    with torch.set_grad_enabled(not no_grad):
        last, losses = mg.unroll(step, w, steps=5, memory=memory, create_graph=None if no_grad else False)
    expected = w.detach()
    for _ in range(5):
        expected = expected - 0.01 * 4 * expected**3
    torch.testing.assert_close(last.detach(), expected)
    assert last.grad_fn is None
    assert losses.shape == (5,)
    assert not losses.requires_grad


@pytest.mark.parametrize("memory", MEMORIES)
def test_only_what_needs_a_gradient_gets_one(memory):
    x, frozen = leaf(3), torch.ones(3, dtype=torch.float64)
    last, aux = mg.unroll(
        lambda s, t, f: ({"x": s["x"] * f + s["c"], "c": s["c"]}, s["c"]),
        {"x": x, "c": frozen},
        frozen,
        steps=2,
        memory=memory,
    )
    assert last["x"].requires_grad
    assert not last["c"].requires_grad
    assert not aux.requires_grad
    assert torch.equal(torch.autograd.grad(last["x"].sum(), x)[0], torch.ones(3, dtype=torch.float64))


BAD_STEPS = {
    "structure": (lambda s, t: ({"y": s["x"]}, None), "state of the structure it takes"),
    "shape": (lambda s, t: ({"x": s["x"].repeat(2)}, None), r"state\['x'\] was \(\(3,\), torch.float64\)"),
    "dtype": (lambda s, t: ({"x": s["x"].float()}, None), "torch.float32"),
    "no pair": (lambda s, t: s, r"must return \(state, aux\), got dict at t=0"),
}


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_step_that_changes_its_state_is_refused(memory, case):
    step, message = BAD_STEPS[case]
    with pytest.raises(ValueError, match=message):
        mg.unroll(step, {"x": leaf(3)}, steps=2, memory=memory)


@pytest.mark.parametrize("memory", MEMORIES)
def test_truncation_differentiates_only_through_the_last_steps(memory):
    """The state before the last steps is a constant."""
    step, state, lr, w = problem()

    def loss_of(run) -> Tensor:
        last, aux = run()
        return last["a"].pow(2).sum() + last["b"].sin().sum() + aux["loss"][-2:].pow(2).sum()

    loss = loss_of(lambda: mg.unroll(step, state, lr, steps=5, memory=memory, truncate=2))
    with torch.no_grad():
        middle, _ = mg.unroll(step, state, lr, steps=3)

    def two_more():
        now, losses = middle, []
        for t in (3, 4):
            now, aux = step(now, t, lr)
            losses.append(aux["loss"])
        return now, {"loss": torch.stack(losses)}

    middle = {key: value.requires_grad_() for key, value in middle.items()}
    expected = loss_of(two_more)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    orders = []
    for value in (loss, expected):
        first = torch.autograd.grad(value, [lr, w], create_graph=True)
        second = torch.autograd.grad(sum(g.pow(3).sum() for g in first), [lr, w])
        orders.append([*first, *second])
    torch.testing.assert_close(*orders, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="does not depend on params"):
        mg.grad(loss, state)


BATCHES = 6


def on_batches(by_rows, **options):
    """Return the first and second derivatives of a training on batches, with a learning rate for each."""
    x, order, rates, w = (
        leaf(BATCHES, 3, 4),
        torch.arange(BATCHES) % 2,
        leaf(BATCHES, seed=1),
        leaf(4, seed=2),
    )
    scale = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)

    def step(w, t, row, scale):
        (x, rate), first = row["batch"], row["first"]
        gradient = torch.func.grad(lambda w: ((x @ w).tanh()[first:] * scale).square().sum())(w)
        return w - 0.1 * rate * gradient, w.sum()

    def of_all(w, t, x, rates, scale):
        return step(w, t, {"batch": (x[t], rates[t]), "first": order[t]}, scale)

    call = functools.partial(mg.unroll, of_all, w, x, rates, scale)
    if by_rows:
        call = functools.partial(mg.unroll, step, w, scale, inputs={"batch": (x, rates), "first": order})
    last, aux = call(steps=BATCHES, **options)
    first = mg.grad(last.pow(3).sum() + aux.square().sum(), (x, rates, scale), create_graph=True)
    return *first, *mg.grad(sum(g.square().sum() for g in first), (x, rates, scale))


@pytest.mark.parametrize(
    "options", [*({"memory": memory} for memory in MEMORIES), {"states": 2}, {"memory": "log", "truncate": 4}]
)
def test_inputs_are_the_rows_of_arguments(options):
    expected = on_batches(False, truncate=options.get("truncate"))
    torch.testing.assert_close(on_batches(True, **options), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw", "rmsprop"])
def test_a_training_in_single_precision(rule):
    """At the defaults of the rules. Rounding grows at most linearly with the steps and the terms of a sum."""

    def gradient(dtype):
        x, y, w = (leaf(*shape).detach().to(dtype) for shape in ((40, 8, 6), (40, 8), (6,)))
        weights, start = torch.ones_like(y, requires_grad=True), {"w": w}
        own = getattr(mg.optim.rules, rule)(lr=0.05)

        def step(state, t, row):
            loss = lambda w, x, y, c: (((x @ w["w"]).tanh() - y).square() * c).mean()  # noqa: E731
            return own.update(torch.func.grad(loss)(state[0], *row), state[1], state[0]), None

        (last, _), _ = mg.unroll(
            step, (start, own.init(start)), steps=40, inputs=(x, y, weights), memory="log"
        )
        return mg.grad(last["w"].square().sum(), weights).double()

    single, double = gradient(torch.float32), gradient(torch.float64)
    assert (single - double).norm() <= 40 * 8 * torch.finfo(torch.float32).eps * double.norm()


@pytest.mark.parametrize("memory", ["full", "log"])
def test_the_gradient_of_inputs_is_written_once(memory):
    """The gradient of an argument has the size of the argument at every step."""
    x, w, written = leaf(BATCHES, 50), leaf(50, seed=1), []

    class Written(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            is_new = isinstance(result, Tensor) and result.shape == x.shape and not result._is_view()
            written.extend([func] * is_new)
            return result

    def gradient(step, *args, **inputs):
        last, _ = mg.unroll(step, w, *args, steps=BATCHES, memory=memory, **inputs)
        with Written():
            return mg.grad(last.pow(2).sum(), x)

    found = gradient(lambda w, t, row: ((w * row).tanh(), None), inputs=x)
    assert len(written) == 1
    expected = gradient(lambda w, t, x: ((w * x[t]).tanh(), None), x)
    assert len(written) > BATCHES
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_list_with_a_tensor_for_each_step_is_better_passed_as_inputs():
    rates = list(leaf(50).requires_grad_())
    with pytest.warns(UserWarning, match=r"reads a list of 50 tensors.*as inputs="):
        mg.unroll(lambda w, t: (w * rates[t], None), leaf(2), steps=50, memory="step")


class _Exp(torch.autograd.Function):
    """An exponential that saves its result. Dispatch modes see an operation that torch adds for it."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0]


@pytest.mark.parametrize("memory", ["step", "1MiB"])
@pytest.mark.parametrize(
    "mode", [contextlib.nullcontext, lambda: FlopCounterMode(display=False), mg.MemoryTracker]
)
def test_what_modes_and_hooks_call_is_no_part_of_a_step(mode, memory):
    free = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    w, lr = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.4, 0.1))

    def step(w, t, lr):
        loss = _Exp.apply(w).square() * free
        return w - lr * free * mg.grad(loss, w, create_graph=True), loss

    def gradients(memory):
        last, _ = mg.unroll(step, w, lr, steps=4, memory=memory)
        return mg.grad(last**3, (w, lr, free))

    expected = gradients("full")
    with mode():
        found = gradients(memory)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("memory", ["step", "sqrt", "log", "16KiB"])
@pytest.mark.parametrize("watched", ["forward", "backward"])
def test_torch_computes_some_derivatives_by_other_operations_below_a_mode(watched, memory):
    """The second derivative of an index and a reshape has other nodes if a mode is active in one pass only."""
    w, rows = leaf(40, 4), torch.arange(0, 40, 2)

    def step(w, t):
        loss = w[rows].t().reshape(-1).pow(3).sum()
        return w - 0.01 * mg.grad(loss, w, create_graph=True), loss

    def gradient(memory, modes):
        with modes["forward"]:
            last, losses = mg.unroll(step, w, steps=7, memory=memory)
        with modes["backward"]:
            return mg.grad(last.square().sum() + losses.sum(), w)

    modes = {"forward": contextlib.nullcontext(), "backward": contextlib.nullcontext()}
    expected = gradient("full", modes)
    found = gradient(memory, {**modes, watched: mg.MemoryTracker(device="cpu")})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("held_by", ["closure", "argument", "state"])
def test_sparse_tensors_of_torch_are_constants(memory, held_by):
    matrix = torch.eye(3, dtype=torch.float64) + 0.5
    w = leaf(3, 2)

    def gradient(matrix, memory):
        def step(state, t, *args):
            w, *own = state
            used = [*own, *args, matrix][0]
            return ((used @ w).tanh(), *own), None

        state, args = (w, *([matrix] if held_by == "state" else [])), [matrix] * (held_by == "argument")
        last, _ = mg.unroll(step, state, *args, steps=3, memory=memory)
        return mg.grad(last[0].square().sum(), w)

    torch.testing.assert_close(gradient(matrix.to_sparse(), memory), gradient(matrix, "full"))


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.filterwarnings("ignore:.*because BatchNorm1d in training mode updates running statistics")
def test_reading_running_statistics_of_differentiated_steps_is_an_error(memory, tmp_path):
    model, x = torch.nn.BatchNorm1d(2).double(), leaf(2**17, 2)  # a size that full graphs are compiled for
    shared = torch.nn.BatchNorm1d(2).double().eval()
    shared.running_mean, shared.running_var = model.running_mean, model.running_var
    compiled = {"backend": "eager"}
    reads = pytest.raises(
        RuntimeError, match="BatchNorm1d in evaluation mode reads running statistics that a step"
    )

    def with_metric(x, t, grad_mode):
        new = model.train()(x) * x
        with grad_mode():
            return new, model.eval()(new).square().mean()

    def with_shared(x, t):
        new = model(x) * x
        return new, shared(new).square().mean()

    with reads:
        mg.unroll(with_metric, x, torch.enable_grad, steps=1, memory=memory)
    with pytest.raises(RuntimeError, match="the step calls BatchNorm1d in training mode"):
        mg.unroll(with_metric, x, torch.enable_grad, steps=1, memory=memory, compile=compiled)
    model.train()
    with reads:
        mg.unroll(with_shared, x, steps=1, memory=memory)
    with reads:
        mg.unroll(with_shared, x, steps=1, memory=memory, compile=compiled)
    mg.unroll(with_metric, x, torch.enable_grad, steps=1, memory=memory, create_graph=False)
    mg.unroll(with_metric, x, torch.no_grad, steps=2, memory=memory)
    model.train()

    def step(x, t):
        return model(x) * x, None

    for compile in (False, compiled):
        last, _ = mg.unroll(step, x, steps=2, memory=memory, compile=compile)
        model(last)
        model.eval()
        with torch.no_grad():
            model(last)
        for module in (model, shared):
            with reads:
                module(last)
        model(x)  # does not depend on the steps
        other = torch.nn.BatchNorm1d(2).double()
        mg.unroll(lambda x, t, other=other: (other(x), None), x, steps=1, memory=memory)
        with reads:
            model(last)
        model.train()
    last, _ = mg.unroll(step, x, steps=2, memory=memory, create_graph=False)
    model.eval()(last)
    model.train()
    last, _ = mg.unroll(step, x, steps=2, memory=memory)
    del last
    model(x)
    torch.save(model, tmp_path / "model.pt")


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("create_graph", [True, False])
def test_a_gradient_with_respect_to_an_argument_is_a_partial_derivative(memory, create_graph):
    """The learning rate moves along its derivative, although the state depends on it."""
    w, lr = leaf(3), torch.tensor(0.2, dtype=torch.float64, requires_grad=True)

    def step(w, t, lr, row):
        loss = (w.sin() * (1 + lr) * row).sum()
        along_w, along_lr = mg.grad(loss, [w, lr], create_graph=True)
        return w - lr * along_w + 0.1 * along_lr, loss

    expected, state = [], w.detach()
    for t in range(4):
        state, loss = step(state.requires_grad_(), t, lr, torch.ones(()))
        state = state.detach()
        expected.append(loss.detach())
    last, losses = mg.unroll(step, w, lr, torch.ones(()), steps=4, memory=memory, create_graph=create_graph)
    torch.testing.assert_close((last.detach(), losses.detach()), (state, torch.stack(expected)))


@pytest.mark.parametrize("memory", ["full", "step", "sqrt", "1MiB"])
@pytest.mark.parametrize("state", ["kept", "closed over", "dependent", "twice"])
def test_a_gradient_in_the_step_is_a_partial_derivative(memory, state):
    """A tensor of the state can be one of the step before, or of the closure, and others can depend on it."""
    start = torch.tensor([0.3, 0.7], dtype=torch.float64)
    free = torch.tensor([0.2, -0.4], dtype=torch.float64, requires_grad=True)

    def step(pair, t):
        a, b = pair
        loss = (a * b).sin().sum() + (a**2).sum()
        along_a, along_b = mg.grad(loss, [a, b], create_graph=True)
        if state == "kept":
            return ((a - 0.3 * along_a, b) if t % 2 else (a, b - 0.3 * along_b)), loss
        return (free if state == "closed over" else a - 0.3 * along_a, b - 0.3 * along_b), loss

    def final(a):
        second = {"dependent": a**2, "twice": a}.get(state, free.sin())
        (a, b), losses = mg.unroll(step, (a, second), steps=4, memory=memory)
        return (a * b).sum() + losses.sum()

    assert torch.autograd.gradcheck(final, [start.requires_grad_()])
    assert torch.autograd.gradgradcheck(final, [start])
