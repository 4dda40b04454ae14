"""Plans of few states: as few repeated steps as dynamic programming finds, and never more states."""

import functools

import pytest

from metagrad.autograd.unrolling.plan import Plan, Reversal, states_of
from metagrad.core.budget import BudgetError


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
