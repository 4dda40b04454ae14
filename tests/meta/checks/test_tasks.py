from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim import rules
from tests.meta.checks.test_preflight import Applied, Recurrent, Wrong, chain, meta_batch, seen


def slower(model, **arguments):
    report = mg.preflight(model, F.mse_loss, meta_batch(), **arguments)
    assert report.ok
    return [f for f in report.findings if f.verdict == "slower"]


class Scattered(nn.Module):
    def forward(self, x):
        return torch.select_scatter(x, x[:, 0] ** 2, 1, 0)


class Drawing(nn.Module):
    def forward(self, x):
        return x * random.random()


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x


def test_a_model_that_stacks_and_compiles_has_no_finding():
    maml = mg.MAML(chain(nn.Tanh()), F.mse_loss, inner=rules.sgd(lr=0.1), steps=1, compile=True)
    assert not mg.preflight(maml, meta_batch()).findings
    assert not maml._cache.stacking._stackable
    assert not maml._cache.stacking._reasons


def test_an_lstm_runs_task_by_task():
    (finding,) = slower(Recurrent())
    assert (finding.module, finding.kind) == ("lstm", "LSTM")
    assert "torch.vmap has no rule for LSTM (lstm)" in finding.reason


def test_running_statistics_run_task_by_task_and_can_be_taken():
    model = chain(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    statistics = model[1].running_mean
    assert [(f.module, f.fixable) for f in slower(model)] == [("1", True), ("3", True)]
    with mg.preflight(model, F.mse_loss, meta_batch(), fix=True) as report:
        assert not report.findings
        assert [f.module for f in report.fixed] == ["1", "3"]
        assert model[1].running_mean is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mg.MAML(model, F.mse_loss, inner=rules.sgd(lr=0.1), steps=1)(meta_batch())
    assert model[1].running_mean is statistics
    assert model[1].track_running_stats


@pytest.mark.parametrize(
    ("layer", "module", "reason"),
    [
        (Scattered, "1", "loses the gradient of torch.select_scatter"),
        (Branching, "1", "torch.vmap cannot take the model"),
        (Drawing, "", "the model draws from random"),
    ],
)
def test_what_vmap_does_not_take_is_named(layer, module, reason):
    (finding,) = slower(chain(layer()))
    assert finding.module == module
    assert reason in finding.reason
    assert "task_chunk=1" in finding.remedy


def test_a_loop_that_was_asked_for_is_no_finding():
    maml = mg.MAML(Recurrent(), F.mse_loss, inner=rules.sgd(lr=0.1), steps=0, task_chunk=1)
    assert not mg.preflight(maml, meta_batch()).findings


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(nn.Dropout(0.5), "random numbers are drawn"), (nn.BatchNorm1d(4), "running statistics are written")],
)
def test_what_is_not_compiled_is_said(layer, reason):
    findings = slower(chain(layer), compile=True)
    assert any(reason in f.reason and "without being compiled" in f.reason for f in findings)


def test_the_order_is_what_maml_takes():
    model = chain(nn.LayerNorm(4), nn.Tanh())
    sgd = rules.sgd(lr=0.1)
    orders = [
        mg.preflight(mg.MAML(model, F.mse_loss, inner=sgd, steps=0, order=order), meta_batch()).order
        for order in (1, 2)
    ]
    assert orders == [1, 2]
    hessian = mg.preflight(mg.MAML(model, F.mse_loss, inner=sgd, steps=1), meta_batch(), order=3)
    assert seen(hessian) == [("1", "LayerNorm", "wrong", 3)]


@pytest.mark.parametrize("form", ["dict", "object", "pairs"])
def test_every_form_of_a_meta_batch_is_read(form):
    (xs, ys), (xq, yq) = meta_batch()
    batch = {
        "dict": {"support": {"x": xs, "y": ys}, "query": {"x": xq, "y": yq}},
        "object": mg.tasks.Batch(mg.tasks.Examples(xs, ys), mg.tasks.Examples(xq, yq)),
        "pairs": [(xs, ys), {"x": xq, "y": yq}],
    }[form]
    report = mg.preflight(chain(nn.Tanh()), F.mse_loss, batch)
    assert "3 tasks" in str(report)
    assert not report.memory


def test_other_algorithms_are_looked_at_by_their_own_loss():
    labels = (torch.arange(10) % 5).repeat(3, 1)
    batch = tuple((torch.randn(3, 10, 4), labels) for _ in range(2))
    assert not mg.preflight(mg.ProtoNet(chain(nn.Tanh()), F.cross_entropy), batch).findings
    embedding = nn.Sequential(nn.Linear(4, 8), Applied(Wrong), nn.Linear(8, 6))
    report = mg.preflight(mg.ProtoNet(embedding, F.cross_entropy, task_chunk=1), batch)
    assert seen(report) == [("model.1", "Applied", "wrong", 1)]
    assert list(report.memory) == ["order 1"]
