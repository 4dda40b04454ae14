import dataclasses
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.benchmarks.maml import __main__ as program
from experiments.benchmarks.maml import runner, worker, workloads
from experiments.benchmarks.maml.methods import BASELINE, METHODS, Method, Prepared
from experiments.benchmarks.maml.runner import Record
from experiments.benchmarks.maml.worker import Request

OURS = 'metagrad, "full"'
RIVALS = [name for name, method in METHODS.items() if method.package]


def tiny() -> workloads.Workload:
    batch = mg.tasks.Sinusoid(shots=3, queries=3).sample(2, generator=torch.Generator().manual_seed(0))
    model = mg.models.MLP([1, 4, 1])
    return workloads.Workload("two tasks", model, F.mse_loss, batch, lr=0.01, steps=3, budget=2**20)


@pytest.fixture(autouse=True)
def tiny_workload(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", tiny)


def ask(request: Request) -> dict:
    """Answer here, by way of JSON."""
    return json.loads(json.dumps(worker.answer(Request(**json.loads(request.to_json())))))


def answers(*medians: float, peak: int = 1000, first: float = 0.0) -> list[dict]:
    return [
        {"first": first or median, "median": median, "peak": peak, "peak_by": "allocator"}
        for median in medians
    ]


@pytest.mark.parametrize(
    "name", [n for n, method in METHODS.items() if not method.package and "compile" not in n]
)
def test_methods_agree_with_the_loop(name):
    if name in ("metagrad, tasks together", "metagrad, rows of tables"):
        pytest.skip("is for convolutions, for tables, or where a part adapts")
    records = runner.agreement(ask, "tiny", [BASELINE, name])
    assert [record.note for record in records.values()] == [""] * len(records)
    error = records[name].error
    assert error is not None
    assert error < runner.ROUNDING


def test_rows_of_tables_agree_with_the_loop(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", partial(workloads.table, 300))
    records = runner.agreement(ask, "tiny", workloads.TABLES)
    assert [record.note for record in records.values()] == [""] * len(records)
    answer = ask(Request("sinusoid", "metagrad, rows of tables"))
    assert answer == {"refused": "the model has no embedding tables"}


def test_a_part_of_the_model_adapts(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", lambda: dataclasses.replace(tiny(), adapt="2"))
    records = runner.agreement(ask, "tiny", [name for name in workloads.HEADS if "compile" not in name])
    assert {record.note for record in records.values()} <= {"", "not installed"}
    assert [name for name, record in records.items() if record.note] in ([], ["learn2learn"])
    assert max(record.error or 0.0 for record in records.values()) < runner.ROUNDING


@pytest.mark.slow
def test_the_transformers_tasks_run_together():
    work = dataclasses.replace(workloads.load("transformer-5"), steps=1).double()
    loop, ours = (METHODS[method].prepare(work).run() for method in (BASELINE, 'metagrad, "step"'))
    for a, b in zip(loop, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def with_batch_norm() -> workloads.Workload:
    """A model that cannot be compiled: it has running statistics."""
    work = tiny()
    layers = [torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)]
    return workloads.replace(work, model=torch.nn.Sequential(*layers))


def test_a_maml_that_falls_back_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", with_batch_norm)
    assert "running statistics" in ask(Request("tiny", 'metagrad, "full"', seconds=0.01))["refused"]


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("workload", ["tiny", "conv4-4-1"])
def test_rivals_agree_where_they_are_installed(name, workload):
    pytest.importorskip(METHODS[name].package)
    record = runner.agreement(ask, workload, [BASELINE, name])[name]
    assert (record.note, record.error is not None and record.error < runner.ROUNDING) == ("", True)


def scaled(factor: float) -> Method:
    def prepare(work: workloads.Workload) -> Prepared:
        loop = METHODS[BASELINE].prepare(work)
        return Prepared(lambda: [factor * g for g in loop.run()])

    return Method(prepare)


def test_ours_must_not_be_wrong(monkeypatch):
    monkeypatch.setitem(METHODS, OURS, scaled(1.001))
    with pytest.raises(SystemExit, match=r'tiny: metagrad, "full" does not agree .* error 1\.0e-03'):
        runner.agreement(ask, "tiny", [OURS])


def test_a_rival_that_is_wrong_is_marked(monkeypatch):
    monkeypatch.setitem(METHODS, "a rival", scaled(1.001))
    records = runner.agreement(ask, "tiny", ["a rival"])
    runner.measure(ask, "tiny", records, rounds=1, seconds=0.001)
    assert program.table("tiny", "", records).splitlines()[-1].endswith("wrong by 0.1 %")


def test_ratios_are_of_the_same_round():
    loop = Record(rounds=answers(1.0, 2.0, 4.0, peak=1000))
    ours = Record(rounds=answers(0.5, 0.5, 0.5, peak=250))
    assert runner.ratios(ours, loop) == runner.Ratios(faster=4.0, lowest=2.0, highest=8.0, memory=0.25)


def test_the_table_says_what_was_measured():
    stated = {**answers(0.25, peak=2**19, first=20.0)[0], "peak_by": "compiler"}
    records = {
        BASELINE: Record(error=0.0, rounds=answers(1.0, 1.0, peak=2**20)),
        "JAX jit": Record(error=0.0, rounds=[stated, answers(0.5, first=4.5)[0]]),
    }
    lines = program.table("tiny", "two tasks", records).splitlines()
    assert lines[0] == "tiny: two tasks"
    assert lines[2].split() == [*BASELINE.split(), "1000.0", "1.00x", "1.00", "to", "1.00", "1.00", "1.00x"]
    measured = "JAX jit 375.0 3.00x 2.00 to 4.00 0.50* 0.50x 19.8, 4.0"
    assert lines[3].split() == measured.split()


@pytest.mark.slow
def test_a_process_that_takes_too_long_or_fails_is_a_refusal(tmp_path):
    asked = partial(runner.ask_process, device="cpu", threads=1, cache=tmp_path)
    assert asked(Request("sinusoid", OURS), limit=0.01) == {"refused": "took longer than 0.01 s"}
    assert asked(Request("no such", OURS), limit=60)["refused"] == "failed: KeyError: 'no such'"
