import math
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

import metagrad
from experiments.run.build import build_parts, build_splits, generator
from experiments.run.evaluate import Interval, accuracies, evaluate, mean_interval


def test_mean_interval_in_closed_form():
    # Values -1 and 1, 50 each: mean 0, sample variance 100 / 99.
    interval = mean_interval(torch.tensor([-1.0, 1.0]).repeat(50))
    assert interval.mean == 0
    assert interval.tasks == 100
    assert interval.ci95 == pytest.approx(stats.t.ppf(0.975, 99) * math.sqrt(100 / 99 / 100), rel=1e-7)


def test_an_interval_is_printed_with_the_digits_it_supports():
    assert str(Interval(98.7312, 0.412, 600)) == "98.73 +- 0.41"
    assert str(Interval(2.0, 0.0, 4)) == "2.00 +- 0.00"
    assert str(Interval(1234.5, 210.0, 4)) == "1234 +- 210"


def test_accuracies_in_closed_form():
    logits = torch.tensor([[[2.0, 1.0], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    for labels in ([[0, 1], [0, 1]], [[0, -100], [0, 1]]):
        assert accuracies(logits, torch.tensor(labels)).tolist() == pytest.approx([100.0, 50.0])


def judge(parts, tasks, **settings):
    defaults = {"num_tasks": 7, "steps": 3, "chunk": 7, "generator": generator(0, "test")}
    return evaluate(parts.algorithm, tasks, **{**defaults, **settings}, device=torch.device("cpu"))


def test_zero_steps_change_nothing_and_more_steps_do(composed):
    config = composed("device=cpu")
    parts, tasks = build_parts(config), build_splits(config).test
    unadapted = judge(parts, tasks, steps=0)
    assert unadapted["query_loss"] == unadapted["query_loss_before"]
    adapted = judge(parts, tasks)
    assert adapted["query_loss"].mean < adapted["query_loss_before"].mean
    assert adapted["query_loss"].tasks == 7


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_evaluation_without_grad_is_the_loss_that_training_sees(composed, momentum):
    config = composed("device=cpu", f"algorithm.inner.momentum={momentum}")
    parts, tasks = build_parts(config), build_splits(config).test
    seen = parts.algorithm(tasks.sample(7, generator=generator(0, "test")), steps=3).loss.item()
    assert judge(parts, tasks)["query_loss"].mean == pytest.approx(seen, rel=1e-6)


def test_an_algorithm_with_a_policy_of_norms_is_evaluated_by_its_running_statistics():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    rule, loss_fn = metagrad.optim.rules.sgd(lr=0.1), torch.nn.functional.mse_loss
    maml = metagrad.MAML(model, loss_fn, inner=rule, steps=1, norm="running")
    tasks = metagrad.tasks.Sinusoid(shots=5, queries=5)
    maml(tasks.sample(3, generator=torch.Generator().manual_seed(0)))
    model[2].eval()
    before = [buffer.clone() for buffer in model.buffers()]
    settings = {"num_tasks": 4, "steps": 1, "chunk": 4, "generator": torch.Generator().manual_seed(1)}
    found = judge(SimpleNamespace(algorithm=maml), tasks, **settings)
    assert all(map(torch.equal, model.buffers(), before))
    assert [maml.training, model[1].training, model[2].training] == [True, True, False]
    expected = maml.eval()(tasks.sample(4, generator=torch.Generator().manual_seed(1)))
    assert found["query_loss"].mean == pytest.approx(expected.query_losses.mean().item(), rel=1e-6)


def test_tasks_of_which_none_is_finite_have_no_mean_where_they_may_be_left_out(composed):
    parts = build_parts(composed("device=cpu", "algorithm.nonfinite=skip"))
    tasks = build_splits(composed("device=cpu")).test
    with torch.no_grad():
        next(parts.module.parameters()).fill_(math.nan)
    found = judge(parts, tasks, chunk=4)
    assert {name: (math.isnan(interval.mean), interval.tasks) for name, interval in found.items()} == {
        "query_loss_before": (True, 7),
        "query_loss": (True, 7),
    }
    parts.algorithm.nonfinite = "raise"
    with pytest.raises(FloatingPointError):
        judge(parts, tasks)
