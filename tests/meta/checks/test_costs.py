from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim import rules
from tests.marks import slow
from tests.meta.checks.test_preflight import Recurrent, chain, meta_batch, plain


def tracked(maml, batch):
    """Train one step after two others, as a user would."""
    for _ in range(2):
        maml(batch).loss.backward()
    maml.zero_grad()
    with mg.MemoryTracker("cpu") as mem:
        with mem.phase("forward"):
            loss = maml(batch).loss
        loss.backward()
    return mem.records()[0].after, mem.peak


RULES = {"sgd": rules.sgd(lr=0.01), "adam": rules.adam(0.01), "momentum": rules.sgd(lr=0.01, momentum=0.9)}
CASES = [("sgd", 6), ("sgd", 1), *(slow(name, steps) for name in RULES for steps in (2, 3, 7, 16, 25))]


@pytest.mark.parametrize(("rule", "steps"), CASES)
def test_the_table_is_what_a_tracked_step_takes(rule, steps):
    model, batch = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)), meta_batch()
    arguments = {"inner": RULES[rule], "steps": steps}
    memory = mg.preflight(model, F.mse_loss, batch, **arguments).memory
    assert list(memory) == ["full", "step", "sqrt"]
    for mode, cost in memory.items():
        held, peak = tracked(mg.MAML(model, F.mse_loss, memory=mode, **arguments), batch)
        assert cost.held == pytest.approx(held, rel=0.1)
        assert cost.peak == pytest.approx(peak, rel=0.1)
        assert cost.extrapolated == (steps > 3)


@pytest.mark.slow
def test_a_truncated_loop_keeps_the_last_steps():
    maml = mg.MAML(chain(nn.Tanh()), F.mse_loss, inner=rules.sgd(lr=0.01), steps=12, truncate=5)
    memory = mg.preflight(maml, meta_batch()).memory
    held, peak = tracked(maml, meta_batch())
    assert memory["full"].held == pytest.approx(held, rel=0.1)
    assert memory["full"].peak == pytest.approx(peak, rel=0.1)


def test_block_is_of_chains_alone():
    report = mg.preflight(Recurrent(), F.mse_loss, meta_batch(), inner=rules.sgd(lr=0.01), steps=1)
    assert list(report.memory) == ["full", "step", "sqrt"]


def test_plain_data_has_a_row_for_each_order():
    model, (x, y) = chain(nn.Tanh()), plain(50)
    memory = mg.preflight(model, F.mse_loss, (x, y)).memory
    with mg.MemoryTracker("cpu") as mem:
        F.mse_loss(model(x), y).backward()
    assert memory["order 1"].peak == pytest.approx(mem.peak, rel=0.1)
    assert memory["order 2"].peak > memory["order 1"].peak


def test_what_cannot_be_measured_is_a_note():
    maml = mg.MAML(chain(nn.Tanh()), F.mse_loss, inner=rules.sgd(lr=0.01), steps=1)
    with mg.MemoryTracker("cpu"):
        report = mg.preflight(maml, meta_batch())
    assert not report.memory
    assert "expected no open tracker" in report.notes[0]


def test_learned_rates_and_tables_are_measured():
    class Rated(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(1000, 4), nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.table(ids))

    rate = nn.Parameter(torch.tensor(0.1))
    maml = mg.MAML(Rated(), F.mse_loss, inner=rules.sgd(lr=rate), steps=4, sparse=["table.weight"])
    batch = tuple((torch.randint(1000, (3, 5)), torch.randn(3, 5, 2)) for _ in range(2))
    report = mg.preflight(maml, batch)
    assert report.ok
    assert not report.notes
    assert list(report.memory) == ["full", "step", "sqrt"]
    held, _ = tracked(maml, batch)
    assert report.memory["full"].held == pytest.approx(held, rel=0.1)


CLASSES = (torch.arange(6) % 3).repeat(4, 1)
IMAGES = tuple((torch.randn(4, 6, 4), CLASSES) for _ in range(2))
ALGORITHMS = {
    "anil": lambda model: mg.ANIL(model, F.cross_entropy, head="3", inner=rules.sgd(lr=0.1), steps=14),
    "first order": lambda model: mg.FOMAML(model, F.cross_entropy, inner=rules.sgd(lr=0.1), steps=14),
    "reptile": lambda model: mg.Reptile(model, F.cross_entropy, inner=rules.sgd(lr=0.1), steps=14),
    "proto": lambda model: mg.ProtoMAML(model, F.cross_entropy, head="3", inner=rules.sgd(lr=0.1), steps=14),
    "norms": lambda model: mg.MAML(
        model, F.cross_entropy, inner=rules.sgd(lr=0.1), steps=14, norm="running", tolerance=0.0
    ),
    "loop": lambda model: mg.MAML(model, F.cross_entropy, inner=rules.sgd(lr=0.1), steps=14, task_chunk=1),
    "chunks": lambda model: mg.MAML(model, F.cross_entropy, inner=rules.sgd(lr=0.1), steps=14, task_chunk=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_table_holds_for_every_algorithm(name):
    maml = ALGORITHMS[name](nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 3)))
    maml.model[1].track_running_stats = name == "norms"
    memory = mg.preflight(maml, IMAGES).memory
    assert list(memory)[:3] == ["full", "step", "sqrt"]
    for mode, cost in memory.items():
        held, peak = tracked(maml.keeping(mode), IMAGES)
        assert cost.held == pytest.approx(held, rel=0.1)
        assert cost.peak == pytest.approx(peak, rel=0.1)
