"""How much each schedule keeps, by the storages that are alive, and how many steps its plan repeats."""

import functools

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.autograd.unrolling.plan import Plan, Reversal, states_of
from metagrad.autograd.unrolling.schedule import Trial
from metagrad.autograd.unrolling.steps import Arguments
from metagrad.core.budget import BudgetError
from metagrad.memory.storages import StorageCounter, StorageMode
from tests.marks import slow

WIDTH = 48
STATE = WIDTH * WIDTH * 8


def problem():
    generator = torch.Generator().manual_seed(0)
    w = (torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH).requires_grad_()
    x = torch.randn(8 * WIDTH, WIDTH, generator=generator, dtype=torch.float64)

    def step(w, t, x):
        loss = (x @ w).tanh().square().mean()
        return w - 0.1 * mg.grad(loss, w, create_graph=True), loss

    return step, w, x


def peak(memory, steps: int, states: int | None = None) -> tuple[int, torch.Tensor]:
    """Return the peak of a meta-gradient in bytes, and the meta-gradient."""
    step, w, x = problem()
    with StorageMode(counter := StorageCounter(torch.device("cpu"))):
        last, losses = mg.unroll(step, w, x, steps=steps, memory=memory, states=states)
        gradient = mg.grad(last.pow(2).sum() + losses.sum(), w)
    return counter.peak, gradient


def growth(memory, few, many) -> float:
    """Return the growth of the peak from few to many steps, in bytes."""
    peak(memory, few)  # from now on the derivative of a step is known, and needs less
    return peak(memory, many)[0] - peak(memory, few)[0]


def test_step_keeps_one_state_a_step_and_sqrt_keeps_the_square_root_of_states_and_graphs():
    few, many = 16, 64
    assert growth("step", few, many) == pytest.approx((many - few) * STATE, rel=0.05)
    graph = growth("full", few, many) / (many - few)
    assert growth("sqrt", few, many) <= (8 - 4) * (STATE + graph) * 1.1


def test_few_states_are_enough():
    peak("log", 8)
    assert peak("log", 64)[0] - peak("log", 16)[0] <= 2 * (6 - 4) * STATE * 1.5
    one_step, states = peak("step", 1)[0], 2 * 8 * STATE
    assert peak("log", 200)[0] <= one_step + states + 3 * STATE  # the cotangents of nested calls
    budget = int(one_step + 1.5 * states)  # too small for sqrt(200) states and graphs
    assert peak(budget, 200)[0] <= budget + one_step
    assert peak("full", 32, states=4)[0] - peak("full", 12, states=4)[0] <= 3 * STATE


FEW = [{"memory": "log"}, {"states": 2}, {"states": 3}, {"states": 8}, {"states": 20}]


@pytest.mark.parametrize(
    ("given", "steps"),
    [*((few, steps) for few in FEW for steps in (1, 2, 10, 40)), slow({"memory": "log"}, 1000)],
)
def test_the_step_is_called_as_often_as_planned(given, steps):
    states = min(given.get("states") or states_of("", "log", steps, 0), steps)
    first, number = first_derivative_and_calls(steps, **given)
    assert number <= 1.05 * (Plan(steps, states).forward_steps + steps) + 3
    assert torch.equal(first, first_derivative_and_calls(steps, memory="step")[0])


@pytest.mark.parametrize("steps", [1, 2, 10, 40])
def test_square_root_memory_calls_a_step_at_most_twice(steps):
    first, number = first_derivative_and_calls(steps, memory="sqrt")
    assert number <= 2 * steps
    torch.testing.assert_close(first, first_derivative_and_calls(steps, memory="full")[0], rtol=1e-12, atol=0)


def first_derivative_and_calls(steps, **given):
    """Return a derivative and the number of calls of the step. Check the next derivative against "full"."""
    calls = []
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def gradients(**given):
        calls.clear()
        step = lambda w, t: (calls.append(t), (torch.sin(w) + t / steps, w**2))[1]  # noqa: E731
        last, aux = mg.unroll(step, w, steps=steps, **given)
        first = mg.grad(last + aux.sum(), w, create_graph=True)
        number = len(calls)
        return first, mg.grad(first, w) if steps <= 10 else first, number

    first, second, number = gradients(**given)
    torch.testing.assert_close(second, gradients(memory="full")[1], rtol=1e-12, atol=0)
    return first, number


@pytest.mark.parametrize("steps", [1, 2, 30, slow(60)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 2.0])
def test_a_budget_is_kept_and_used(steps, share):
    one_step, full = peak("step", 1)[0], peak("full", steps)[0]
    budget = int(one_step + 2 * (steps**0.5 + 1) * STATE + share * full)
    used, gradient = peak(f"{budget / 2**20}MiB", steps)
    assert used <= budget + one_step
    torch.testing.assert_close(gradient, peak("full", steps)[1], rtol=1e-10, atol=1e-14)
    if share == 2.0:
        assert used >= 0.9 * full


def test_auto_takes_what_is_free(monkeypatch):
    monkeypatch.setattr("metagrad.autograd.unrolling.schedule.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="memory=1000"):
        peak("auto", 5)
    monkeypatch.undo()
    torch.testing.assert_close(peak("auto", 3)[1], peak("full", 3)[1])


ROWS = 20_000


def table():
    """Return a loop that reads four rows of a table, and moves all of it: its graph is far smaller than its state."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor([3, 5, 8, 13])
    start = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64).requires_grad_()
    calls = []

    def step(w, t, x):
        calls.append(t)
        loss = (F.embedding(rows, w).tanh() * x).square().mean()
        return w - 0.1 * mg.grad(loss, w, create_graph=True), loss

    return step, start, torch.randn(4, 4, generator=generator, dtype=torch.float64), calls


def run_table(memory, steps):
    """Return the bytes that are kept and the peak, the meta-gradient, and how many steps were computed."""
    step, w, x, calls = table()
    with StorageMode(counter := StorageCounter(torch.device("cpu"))):
        last, losses = mg.unroll(step, w, x, steps=steps, memory=memory)
        kept = counter.total
        gradient = mg.grad(last[:20].pow(2).sum() + losses.sum(), w)
    return kept, counter.peak, gradient, len(calls)


@pytest.mark.parametrize(("share", "steps"), [("auto", 1), ("auto", 7), (1, 2), (1.5, 3), (1.5, 7), (4, 3)])
def test_graphs_are_kept_where_they_are_smaller_than_the_states(share, steps):
    kept, peak, expected, _ = run_table("full", steps)
    memory = share if share == "auto" else int(share * kept)
    kept_too, peak_too, gradient, calls = run_table(memory, steps)
    assert calls == steps, "a step was recomputed"
    assert kept_too <= kept
    assert peak_too <= min(peak, run_table("step", steps)[1]) + 1024  # bytes of losses
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("run", "budget", "steps"), [(peak, 1000, 5), (run_table, ROWS * 4 * 8, 7)])
def test_a_budget_that_no_schedule_fits_in_names_the_least(run, budget, steps):
    with pytest.raises(ValueError, match=r"step needs (\d+) bytes.*must be at least (\d+) bytes") as error:
        run(budget, steps)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    assert run is peak or (needed <= run("full", steps)[0] and run(needed, steps)[3] == steps)
    run(needed, steps)
    with pytest.raises(ValueError, match="at least"):
        run(needed - 1, steps)


def of_table():
    step, w, x, _ = table()
    return step, w, x


def saves_its_result():
    def step(state, t, x):
        new = {"a": (state["a"] + x).tanh(), "b": state["b"] + state["a"].sum()}
        return new, None

    return (
        step,
        {k: torch.ones(50, dtype=torch.float64, requires_grad=True) for k in "ab"},
        torch.ones(50).double(),
    )


def passes_a_constant_on():
    def step(state, t, x):
        w, fixed = state
        return (w * fixed.sum() + x, fixed), None

    return step, (torch.ones(50).double().requires_grad_(), torch.ones(70).double()), torch.ones(50).double()


@pytest.mark.parametrize("make", [problem, of_table, saves_its_result, passes_a_constant_on])
def test_what_a_step_adds_is_what_a_loop_that_keeps_every_graph_grows_by(make):
    totals = []
    for steps in (5, 6):
        step, state, x = make()
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            kept = mg.unroll(step, state, x, steps=steps)
            totals.append(counter.total)
        del kept
    step, state, x = make()
    trial = Trial(step, state, Arguments((x,)), 10**12)
    trial.take(0)
    trial.take(1)
    assert trial.needs().growth == pytest.approx(totals[1] - totals[0], abs=16)  # stacked aux


@functools.cache
def fewest(steps, states):
    """Return the fewest steps before all derivatives, by trying every place of the next state."""
    if steps <= 1 or states == 1:
        return steps * (steps - 1) // 2
    return min(k + fewest(steps - k, states - 1) + fewest(k, states) for k in range(1, steps))


def walked(plan):
    """Reverse a loop whose states are numbers. Return the number of steps, and the most states at a time."""
    kept = {t: t for t in plan.kept_first()}

    def replay(state, t):
        assert state == t
        return t + 1

    reversal = Reversal(plan, kept, replay)
    assert [(t, state) for t, state in reversal] == [(t, t) for t in reversed(range(plan.steps))]
    return plan.steps + reversal.replays, reversal.most


@pytest.mark.parametrize("states", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [1, 2, 10, 57])
def test_no_order_repeats_fewer_steps(steps, states):
    plan = Plan(steps, states)
    count, most = walked(plan)
    assert count == plan.forward_steps == fewest(steps, states) + (1 if steps > 1 else steps)
    assert most <= states + 1  # the state before the last step is kept in addition


@pytest.mark.parametrize(("steps", "most"), [(100, 15), (1000, 21), (10_000, 29)])
def test_logarithmically_many_states_are_enough(steps, most):
    plan = Plan(steps, states_of("call", "log", steps, 1))
    count, found = walked(plan)
    assert count == plan.forward_steps <= 3.6 * steps
    assert found <= most


def test_a_budget_is_as_many_states_as_fit():
    assert states_of("call", 1000, 50, 100) == 10
    assert states_of("call", 1000, 5, 100) == 5
    with pytest.raises(BudgetError, match="call: memory=99 bytes is less than one state"):
        states_of("call", 99, 5, 100)
