import json
import logging
import math
import sys
import types
from unittest import mock

import pytest
import torch
from hydra.errors import ConfigCompositionException

import metagrad as mg
from experiments.run.build import build, build_parts
from experiments.run.fit import preflight
from experiments.run.metrics import last_values, read_rows, series, value_of
from experiments.train import run_job
from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.tasks import Batch, Examples
from tests.experiments.conftest import FAST
from tests.meta.checks.test_preflight import Applied, Wrong

FILES = [
    "provenance.json",
    "metrics.jsonl",
    "costs.jsonl",
    "checkpoints/last.pt",
    "memory.txt",
    "memory.jsonl",
    "result.json",
    "plots/learning_curve.png",
    "plots/adaptation.png",
]


class SupportMean(torch.nn.Module):
    """An algorithm of the protocol that shifts the predictions of a model by its mean error on support examples."""

    def __init__(self, model, loss_fn, **settings):
        super().__init__()
        self.model = model

    def adapt(self, support, *, steps=None):
        shift = (support.y - self.model(support.x)).mean(1, keepdim=True) * (steps != 0)
        losses, used = shift.new_zeros(len(shift), 0), torch.zeros(len(shift), dtype=torch.int64)
        return mg.meta.AdaptedModel(
            {"shift": shift}, losses, used, used.bool(), lambda params, x: self.model(x) + params["shift"]
        )

    def forward(self, batch, *, steps=None):
        fast = self.adapt(batch.support, steps=steps)
        outputs = fast(batch.query.x)
        losses = (outputs - batch.query.y).square().flatten(1).mean(1)
        return mg.meta.MetaOutput(
            losses.mean(), losses, outputs, fast.support_losses, fast.steps, fast.skipped
        )


def test_a_run_takes_any_algorithm_of_the_protocol(run, tmp_path):
    run(tmp_path, f"algorithm._target_={__name__}.SupportMean", "allow=[tests.]", plots=True)
    assert [name for name in FILES if not (tmp_path / name).exists()] == []
    metrics = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert metrics["test/query_loss"]["mean"] != metrics["test/query_loss_before"]["mean"]
    assert all(math.isfinite(metric["mean"]) for metric in metrics.values())


def test_metrics_have_one_row_a_step_and_names_with_groups(fast_run):
    rows = read_rows(fast_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert set(rows[1]) == {"step", "train/query_loss", "train/support_loss", "optimizer/lr"}
    after = {"validation/query_loss", "validation/query_loss_ci95"}
    before = {"validation/query_loss_before", "validation/query_loss_before_ci95"}
    assert set(rows[0]) == {"step"} | after | before


def test_the_result_has_its_protocol(fast_run):
    result = json.loads((fast_run / "result.json").read_text())
    assert result["step"] == 4
    assert set(result["metrics"]) == {"test/query_loss_before", "test/query_loss"}
    protocol = result["protocol"]
    assert (protocol["test_tasks"], protocol["inner_steps_test"], protocol["algorithm"]["order"]) == (4, 5, 2)
    assert protocol["inner_rule"]["lr"] == 0.01
    assert protocol["batch_norm"] == "none in the model"
    assert "shots=10" in protocol["tasks"]


def test_memory_is_that_of_inner_and_outer_steps(fast_run):
    records = [json.loads(line) for line in (fast_run / "memory.jsonl").read_text().splitlines()]
    assert {record["outer"] for record in records if record["outer"] is not None} == {0, 1}
    names = [record["name"] for record in records if record["outer"] == 0]
    assert names == ["outer", "sample", *["inner"] * 5, "query", "backward", "optimizer"]
    assert "inner step" in (fast_run / "memory.txt").read_text()


def test_tracking_memory_does_not_change_a_number(run, fast_run, tmp_path):
    untracked = run(tmp_path, "memory.enabled=false")
    assert not (untracked / "memory.txt").exists()
    assert (untracked / "metrics.jsonl").read_bytes() == (fast_run / "metrics.jsonl").read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(run, fast_run, tmp_path):
    torch.rand(7)
    assert (run(tmp_path / "a") / "metrics.jsonl").read_bytes() == (fast_run / "metrics.jsonl").read_bytes()
    assert (run(tmp_path / "b", "seed=1") / "metrics.jsonl").read_bytes() != (
        fast_run / "metrics.jsonl"
    ).read_bytes()


def test_a_cosine_ends_at_zero(run, tmp_path):
    rates = series(
        read_rows(run(tmp_path, "schedule=cosine", "optimizer=sgd") / "metrics.jsonl"), "optimizer/lr"
    )[1]
    assert rates[0] == pytest.approx(0.01 * (1 + 2**-0.5) / 2)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_preflight_ends_a_run_whose_derivatives_are_wrong(composed):
    config = composed(*FAST)
    parts = build_parts(config)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), Applied(Wrong), torch.nn.Linear(4, 1))
    maml = mg.MAML(model, parts.loss_fn, inner=mg.optim.rules.sgd(lr=0.1), steps=0)
    with pytest.raises(MissingDerivative, match=r"(?s)preflight=true found.*wrong +1 +1 +Applied"):
        preflight(parts._replace(algorithm=maml), lambda: build(config.task).sample(2))


@pytest.mark.slow
def test_wandb_offline_mirrors_every_job_into_its_own_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for folder in (
        run(tmp_path / "0", "logger=wandb", plots=True),
        run(tmp_path / "1", "logger=wandb", "seed=1", plots=True),
    ):
        assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 1
        images = folder.glob("wandb/offline-run-*/files/media/images/plots/*")
        assert {path.name.partition("_")[0] for path in images} == {"adaptation", "learning"}


def test_the_report_has_result_memory_and_plots(run, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "experiments.train"):
        run(tmp_path, plots=True)
    report = caplog.messages[-1]
    assert "query loss: " in report
    assert "after 5 inner steps  (ratio " in report
    assert "Protocol:" in report
    assert "inner steps:" in report
    assert "learning_curve.png" in report


METRICS = ["validation/query_loss", "train/query_loss", "test/query_loss_before", "optimizer/lr"]


def test_a_sweep_gets_the_metric_it_asks_for(composed, fast_run, tmp_path):
    rows, result = read_rows(fast_run / "metrics.jsonl"), json.loads((fast_run / "result.json").read_text())
    measured = {**last_values(rows), **{name: value["mean"] for name, value in result["metrics"].items()}}
    config = composed(*FAST, "memory.enabled=false")
    assert config.metric == METRICS[0]
    with mock.patch("experiments.train.draw", return_value=[]):
        assert (
            run_job(config, tmp_path)
            == measured["validation/query_loss"]
            == rows[-1]["validation/query_loss"]
        )
    assert [value_of(name, measured) for name in METRICS] == [measured[name] for name in METRICS]


def test_the_unit_of_a_metric_may_be_left_out():
    assert value_of("test/accuracy", {"test/accuracy_before(%)": 20.0, "test/accuracy(%)": 90.0}) == 90.0


def test_a_metric_that_is_not_measured_is_refused_before_training(run, tmp_path):
    measured = "what is: validation/query_loss_before, "
    with pytest.raises(ValueError, match=rf"metric=test/los is not measured; {measured}"):
        run(tmp_path, "metric=test/los")
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1


def test_a_model_that_does_not_fit_the_tasks_is_refused_before_anything_is_written(run, tmp_path):
    says = r"inputs \[10, 1\] and targets \[10, 1\] of a task, MLP or the loss says: (addmm: )?mat1"
    with pytest.raises(ValueError, match=f"train: the model and the tasks do not fit: .*{says}"):
        run(tmp_path, "model.sizes=[2,4,1]")
    assert list(tmp_path.iterdir()) == []


def test_the_keys_of_an_inner_rule_are_its_arguments(composed):
    chosen = composed("algorithm/inner=adam", "algorithm.inner.betas=[0.5,0.75]", "algorithm.inner.lr=0.125")
    rule, default = build(chosen.algorithm.inner), build(composed().algorithm.inner)
    assert (rule.lr, list(rule.betas)) == (0.125, [0.5, 0.75])
    assert (default.lr, default.momentum) == (0.01, 0.0)
    with pytest.raises(ConfigCompositionException, match=r"Could not override 'algorithm\.inner\.beta'"):
        composed("algorithm/inner=adam", "algorithm.inner.beta=1")


class Linear(torch.nn.Linear):
    """A model of a user's."""

    def __init__(self, width):
        super().__init__(1, width)


class Lines:
    """Tasks of a user's."""

    def sample(self, num_tasks, *, generator=None):
        x = torch.rand(2, num_tasks, 5, 1, generator=generator)
        return Batch(*(Examples(part, 2 * part) for part in x))


def halving(lr):
    """Return a rule of a user's."""
    return mg.optim.rules.chain(mg.optim.rules.clip_by_norm(1.0), mg.optim.rules.sgd(lr / 2))


OWN = [
    "model=custom",
    "model.args.width=1",
    "task=custom",
    "algorithm/inner=custom",
    "algorithm.inner.args={lr: 0.5}",
]


@pytest.fixture
def own_package(monkeypatch):
    module = types.ModuleType("mypackage")
    module.Linear, module.Lines, module.halving = Linear, Lines, halving  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mypackage", module)
    return [
        *OWN,
        "model._target_=mypackage.Linear",
        "task._target_=mypackage.Lines",
        "algorithm.inner._target_=mypackage.halving",
    ]


def test_a_model_a_task_and_a_rule_of_the_users_are_trained(run, tmp_path, own_package):
    folder = run(tmp_path, *own_package, "allow=[mypackage.]", "memory.enabled=false")
    losses = series(read_rows(folder / "metrics.jsonl"), "train/query_loss")[1]
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("allow", ["[]", "[mypack]"])
def test_packages_that_are_not_allowed_are_refused_with_what_to_say(run, tmp_path, own_package, allow):
    with pytest.raises(ValueError, match=r"=mypackage\.Lines is not allowed; .* allow=\[mypackage\.\]"):
        run(tmp_path, *own_package, f"allow={allow}")


def test_everything_cannot_be_allowed(run, tmp_path, own_package):
    with pytest.raises(ValueError, match=r"allow must be a list of packages"):
        run(tmp_path, *own_package, "allow=[.]")


def test_targets_in_lists_are_checked_too(composed):
    links = "algorithm.inner.args={_args_: [{_target_: os.system, command: ls}]}"
    target = "algorithm.inner._target_=metagrad.optim.rules.chain"
    with pytest.raises(ValueError, match=r"_target_=os\.system is not allowed"):
        build(composed("algorithm/inner=custom", target, links).algorithm.inner)
