"""How much each schedule keeps, by the storages that are alive."""

from __future__ import annotations

import pytest
import torch

import metagrad as mg
from metagrad.memory.storages import Ledger, StorageMode

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


def peak(memory, steps: int) -> tuple[int, torch.Tensor]:
    """Return the peak of a meta-gradient in bytes, and the meta-gradient."""
    step, w, x = problem()
    with StorageMode(ledger := Ledger(torch.device("cpu"))):
        last, losses = mg.unroll(step, w, x, steps=steps, memory=memory)
        gradient = mg.grad(last.pow(2).sum() + losses.sum(), w)
    return ledger.peak, gradient


def test_step_keeps_one_state_a_step_and_sqrt_keeps_its_square_root():
    few, many = 25, 100
    slope = (peak("step", many)[0] - peak("step", few)[0]) / (many - few)
    assert slope == pytest.approx(STATE, rel=0.05)
    growth = peak("sqrt", many)[0] - peak("sqrt", few)[0]
    assert growth <= 2 * (10 - 5) * STATE * 1.1


@pytest.mark.parametrize("steps", [1, 2, 30, 60])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 2.0])
def test_a_budget_is_kept_and_used(steps, share):
    one_step, full = peak("step", 1)[0], peak("full", steps)[0]
    budget = int(one_step + 2 * (steps**0.5 + 1) * STATE + share * full)
    used, gradient = peak(budget, steps)
    assert used <= budget + one_step
    torch.testing.assert_close(gradient, peak("full", steps)[1], rtol=1e-10, atol=1e-14)
    if share == 2.0 and steps > 2:  # the first step, which is measured, is always recomputed
        assert used >= 0.9 * full


def test_a_budget_below_one_step_says_how_much_is_needed():
    with pytest.raises(
        ValueError, match=r"one step needs (\d+) bytes.*must be at least (\d+) bytes"
    ) as error:
        peak(1000, 5)
    needed = int(str(error.value).split("at least ")[1].split()[0])
    peak(needed, 5)
    with pytest.raises(ValueError, match="at least"):
        peak(needed - 1, 5)


def test_auto_takes_what_is_free(monkeypatch):
    monkeypatch.setattr("metagrad.autograd.schedule.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match="memory=1000"):
        peak("auto", 5)
    monkeypatch.undo()
    torch.testing.assert_close(peak("auto", 3)[1], peak("full", 3)[1])


@pytest.mark.parametrize("memory", ["1500KB", "1.5MiB", "2e6", " 1 gb ", 3.5e6])
def test_budgets_may_be_written_in_several_ways(memory):
    torch.testing.assert_close(peak(memory, 2)[1], peak("full", 2)[1])
