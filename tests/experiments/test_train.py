from __future__ import annotations

import json
import logging
import sys

import pytest
import torch

from experiments.metrics import read_rows, series

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
    "plots/memory.png",
]


@pytest.mark.parametrize("name", FILES)
def test_a_run_leaves_its_files(fast_run, name):
    assert (fast_run / name).stat().st_size > 0


def test_metrics_have_one_row_a_step_and_names_with_groups(fast_run):
    rows = read_rows(fast_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert set(rows[1]) == {"step", "train/query_loss", "train/support_loss", "optimizer/lr"}
    after = {"validation/query_loss", "validation/query_loss_ci95"}
    before = {"validation/query_loss_before", "validation/query_loss_before_ci95"}
    assert set(rows[0]) == {"step"} | after | before


def test_costs_are_apart(fast_run):
    rows = read_rows(fast_run / "costs.jsonl")
    assert set(rows[0]) == {"step", "time/outer_step(ms)", "memory/peak(MiB)"}
    assert min(row["memory/peak(MiB)"] for row in rows) > 10


def test_the_result_has_its_protocol(fast_run):
    result = json.loads((fast_run / "result.json").read_text())
    assert result["step"] == 4
    assert set(result["metrics"]) == {"test/query_loss_before", "test/query_loss"}
    protocol = result["protocol"]
    assert (protocol["test_tasks"], protocol["inner_steps_test"], protocol["order"]) == (4, 5, 2)
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
    assert not (untracked / "plots" / "memory.png").exists()
    assert (untracked / "metrics.jsonl").read_bytes() == (fast_run / "metrics.jsonl").read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(run, fast_run, tmp_path):
    torch.rand(7)
    assert (run(tmp_path / "a") / "metrics.jsonl").read_bytes() == (fast_run / "metrics.jsonl").read_bytes()
    assert (run(tmp_path / "b", "seed=1") / "metrics.jsonl").read_bytes() != (
        fast_run / "metrics.jsonl"
    ).read_bytes()


def test_the_first_order_is_another_trajectory_from_the_same_start(run, fast_run, tmp_path):
    first_order = series(read_rows(run(tmp_path, "algorithm=fomaml") / "metrics.jsonl"), "train/query_loss")[
        1
    ]
    second_order = series(read_rows(fast_run / "metrics.jsonl"), "train/query_loss")[1]
    assert first_order[0] == second_order[0]
    assert first_order[1:] != second_order[1:]


def test_a_cosine_ends_at_zero(run, tmp_path):
    rates = series(
        read_rows(run(tmp_path, "schedule=cosine", "optimizer=sgd") / "metrics.jsonl"), "optimizer/lr"
    )[1]
    assert rates[0] == pytest.approx(0.01 * (1 + 2**-0.5) / 2)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_evaluation_in_chunks_gives_the_same_result(run, fast_run, tmp_path):
    chunked = json.loads((run(tmp_path, "evaluate.chunk=2") / "result.json").read_text())["metrics"]
    whole = json.loads((fast_run / "result.json").read_text())["metrics"]
    # The tasks of a chunk are drawn together, so chunks of another size are other tasks.
    assert {name: value["tasks"] for name, value in chunked.items()} == dict.fromkeys(whole, 4)


def test_anomaly_mode_is_on_for_its_run_only(run, tmp_path, recwarn):
    run(tmp_path / "a", "anomaly=true")
    assert torch.is_anomaly_enabled()
    run(tmp_path / "b")
    assert not torch.is_anomaly_enabled()


def test_threads_are_those_of_the_run(run, tmp_path):
    default = torch.get_num_threads()
    recorded = [
        json.loads((run(tmp_path / name, f"threads={value}") / "provenance.json").read_text())["threads"]
        for name, value in (("a", 1), ("b", "null"))
    ]
    assert recorded == [1, default]


def test_no_wandb_is_needed_without_its_logger(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert (run(tmp_path) / "result.json").exists()


def test_a_missing_wandb_is_told(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ValueError, match="logger=wandb needs the package wandb; install it or set logger=none"
    ):
        run(tmp_path, "logger=wandb")


def test_wandb_offline_mirrors_every_job_into_its_own_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for folder in (run(tmp_path / "0", "logger=wandb"), run(tmp_path / "1", "logger=wandb", "seed=1")):
        assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 1
        images = folder.glob("wandb/offline-run-*/files/media/images/plots/*")
        assert {path.name.partition("_")[0] for path in images} == {"adaptation", "learning", "memory"}


def test_wandb_disabled_writes_nothing(run, fast_run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = run(tmp_path, "logger=wandb")
    assert not list(folder.glob("wandb/*run*"))
    assert (folder / "metrics.jsonl").read_bytes() == (fast_run / "metrics.jsonl").read_bytes()


def test_a_loss_that_is_not_finite_names_iteration_task_and_step(run, tmp_path):
    with pytest.raises(
        FloatingPointError, match=r"Iteration \d+: MAML: the loss of task \d+ is .* at inner step \d"
    ):
        run(tmp_path, "algorithm.inner.lr=1e30", "evaluate.steps=0", "plots.steps=1")


def test_the_report_has_result_memory_and_plots(run, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "experiments.train"):
        run(tmp_path)
    report = caplog.messages[-1]
    assert "query loss: " in report
    assert "after 5 inner steps  (ratio " in report
    assert "Protocol:" in report
    assert "Each inner step adds" in report
    assert "learning_curve.png" in report
