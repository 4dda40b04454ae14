import itertools
import json
import shutil

import pytest

from experiments.compare import compare, differing, find_jobs, main, table
from experiments.run.plots.learning import mean_curve
from tests.experiments.conftest import FAST
from tests.marks import combined


@pytest.fixture(scope="module")
def swept(run, tmp_path_factory):
    """Return the folder of a sweep of two algorithms and two seeds, as Hydra leaves it."""
    folder = tmp_path_factory.mktemp("sweep")
    for number, (algorithm, seed) in enumerate(itertools.product(("maml", "fomaml"), "01")):
        overrides = [f"algorithm={algorithm}", f"seed={seed}"]
        job = run(folder / str(number), *overrides, "memory.enabled=false")
        (job / ".hydra").mkdir()
        (job / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    return folder


@pytest.fixture
def copied(swept, tmp_path):
    """Return a copy of the sweep, to be damaged."""
    return shutil.copytree(swept, tmp_path / "sweep")


def lines(folder):
    jobs = find_jobs(folder)
    return table(jobs, differing(jobs)).splitlines()


@pytest.mark.slow
def test_the_program_sweeps_into_one_folder_for_each_job(program, swept, tmp_path):
    """No job depends on those before it."""
    sweep = ["-m", "algorithm=maml,fomaml", "seed=0,1", *FAST, "memory.enabled=false"]
    code, _, err = program("train", *sweep, "hydra.sweep.dir=multirun", cwd=tmp_path)
    assert code == 0, err
    for job, alone in zip(find_jobs(tmp_path / "multirun"), find_jobs(swept), strict=True):
        assert (job.status, job.overrides["seed"]) == ("finished", alone.overrides["seed"])
        assert job.overrides["algorithm"] == alone.overrides["algorithm"]
        rows = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (alone.folder, job.folder)]
        first = [json.loads(side[1])["train/query_loss"] for side in rows]
        assert first[0] == pytest.approx(first[1], rel=1e-6)


def test_the_table_groups_by_what_differs_and_averages_over_seeds(swept):
    header, maml, fomaml, _ = lines(swept)
    assert header.split() == ["setting", "runs", "query_loss_before", "query_loss"]
    assert maml.startswith("algorithm=maml ")
    assert fomaml.startswith("algorithm=fomaml ")
    losses = [
        json.loads((swept / job / "result.json").read_text())["metrics"]["test/query_loss"]["mean"]
        for job in "01"
    ]
    assert f"{sum(losses) / 2:.4g} +- {abs(losses[0] - losses[1]) / 2**0.5:.2g}" in maml
    assert "2 / 2" in maml


def test_what_is_not_finished_is_listed(copied):
    (copied / "2" / "result.json").unlink()
    (copied / "3" / "failure.txt").write_text("MAML: the loss of task 3 is nan\n")
    (copied / "3" / "result.json").unlink()
    _, maml, fomaml, _, *listed = lines(copied)
    assert "2 / 2" in maml
    assert "0 / 2" in fomaml
    assert listed[0].startswith("  2 (algorithm=fomaml seed=0): ")
    assert [line.partition("): ")[2] for line in listed] == [
        "unfinished at step 4",
        "failed: MAML: the loss of task 3 is nan",
    ]


def test_the_program_prints_the_table_and_draws(copied, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare", str(copied)])
    main()
    assert "algorithm=fomaml" in capsys.readouterr().out
    assert (copied / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_mean_curve_is_over_the_steps_all_have():
    assert mean_curve([([0, 10, 20], [1.0, 2.0, 3.0]), ([0, 10], [3.0, 6.0])]) == ([0, 10], [2.0, 4.0])


@pytest.fixture
def finished_run(fast_run, tmp_path):
    """Return a sweep of one copy of a finished run, to be damaged."""
    folder = tmp_path / "sweep" / "0"
    shutil.copytree(fast_run, folder)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- seed=0\n")
    return folder


REASONS = [
    ("", "failed: without a reason"),
    ("MAML: nan\n", "failed: MAML: nan"),
    ("Interrupted by SIGINT after 3 of 4 iterations.\n", "Interrupted by SIGINT after 3 of 4 iterations."),
]


@pytest.mark.parametrize(("words", "status"), REASONS)
def test_a_run_without_a_result_says_why(finished_run, words, status):
    (finished_run / "result.json").unlink()
    (finished_run / "failure.txt").write_text(words)
    assert find_jobs(finished_run.parent)[0].status == status


@pytest.mark.parametrize(
    ("content", "name"),
    combined(
        [b"{", b"\xff\xfe"],
        ["result.json", ".hydra/overrides.yaml", "metrics.jsonl"],
        fast=lambda content, name: content == b"{" or name == "result.json",
    ),
)
def test_a_damaged_file_is_listed_and_hides_no_other_run(finished_run, capsys, name, content):
    whole = finished_run.parent / "1"
    shutil.copytree(finished_run, whole)
    if name == "metrics.jsonl":
        (finished_run / "result.json").unlink()
    (finished_run / name).write_bytes(content)
    compare([finished_run.parent])
    assert find_jobs(finished_run.parent)[1].status == "finished"
    assert "query_loss" in capsys.readouterr().out
