"""Several processes of one run compute what one does, and survive what ends one of them."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.run import checkpoint, loop, outer, ranks, resume
from experiments.run.build import build_parts, generator
from experiments.run.config import plain
from experiments.run.evaluate import evaluate
from experiments.run.metrics import read_rows
from experiments.run.ranks import SILENT, Ranks
from experiments.train import run_job
from tests.distributed.threads import in_threads
from tests.experiments.conftest import REPOSITORY
from tests.experiments.run.test_resume import same_outcome
from tests.experiments.saving import save_for_ever

SETTINGS = [
    "debug=fast",
    "logger=none",
    "device=cpu",
    "iterations=60",
    "meta_batch=5",
    "evaluate.every=20",
    "evaluate.chunk=4",
    "evaluate.validation_tasks=5",
    "evaluate.tasks=7",
    "checkpoint.every=8",
    "algorithm.inner.momentum=0.5",
]


# The command line


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Return a function that sets the variables of torchrun, and the working directory."""
    monkeypatch.chdir(tmp_path)

    def launch(rank=0, size=2, run_id="none", restarts=0):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": restarts,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return launch


def run_folder(path):
    (path / "checkpoints").mkdir(parents=True)
    (path / checkpoint.FILE).touch()
    (path / ".hydra").mkdir()
    (path / ".hydra" / "overrides.yaml").write_text("- seed=3\n")
    return path


def test_processes_have_one_folder_and_the_first_alone_writes(launched):
    launched(run_id="abc")
    assert ranks.command_line(["seed=1"]) == ["seed=1", "hydra.run.dir=outputs/abc"]
    launched(rank=1, run_id="abc")
    assert ranks.command_line(["seed=1"]) == ["seed=1", "hydra.run.dir=outputs/abc", *SILENT]
    assert ranks.command_line(["hydra.run.dir=x"]) == ["hydra.run.dir=x", *SILENT]
    assert ranks.command_line(["resume=x.pt"]) == ["resume=x.pt", "hydra.run.dir=outputs/abc", *SILENT]


@pytest.mark.parametrize("given", [[], ["hydra.run.dir=outputs/${now:%H}"]])
def test_processes_without_a_folder_in_common_are_refused(launched, given):
    launched(run_id="none" if not given else "abc")
    with pytest.raises(ValueError, match=r"must write to one folder. Start them by torchrun --standalone"):
        ranks.command_line(given)


@pytest.mark.parametrize("given", [[], ["hydra.run.dir=outputs/abc"], ["resume=x.pt"]])
def test_processes_that_are_started_again_go_on_from_the_checkpoint(launched, tmp_path, given):
    launched(run_id="abc", restarts=1)
    assert resume.AUTO not in " ".join(ranks.command_line(given))  # there is none yet: from the beginning
    run_folder(tmp_path / "outputs" / "abc")
    completed = ranks.command_line([*given, "seed=4"])
    assert completed[-1] == "resume=auto"
    assert [a.replace("'", "") for a in completed if "hydra" in a] == ["hydra.run.dir=outputs/abc"]
    assert "resume=x.pt" not in completed


# Communication between processes, in threads


def test_means_are_over_all_tasks_and_a_process_without_any_does_not_count():
    def process(group):
        own = Ranks(group)
        weight = [1, 3, 0][own.rank]
        values = {} if own.rank == 2 else {"loss": float(own.rank)}
        return (
            own.mean(values, weight),
            own.total(weight),
            own.largest(own.rank),
            own.gathered(own.rank),
        )

    assert in_threads(3, process) == [({"loss": 0.75}, 4, 2, [0, 1, 2])] * 3


def test_evaluation_of_shares_is_that_of_all_tasks_in_their_order(composed):
    config = composed("device=cpu")
    tasks = mg.tasks.Sinusoid(shots=4, queries=3)
    settings = {"num_tasks": 7, "steps": 2, "chunk": 3, "device": torch.device("cpu")}

    parts = [build_parts(config) for _ in range(2)]
    parts[1].module.load_state_dict(parts[0].module.state_dict())

    def judged(own):
        return evaluate(
            parts[own.rank].algorithm, tasks, generator=generator(0, "test"), ranks=own, **settings
        )

    expected, found = judged(Ranks()), in_threads(2, lambda group: judged(Ranks(group)))
    assert found[0] == found[1]
    for name, interval in expected.items():
        assert found[0][name] == pytest.approx(interval, rel=1e-5)


def test_a_process_that_has_ended_is_told_in_a_sentence():
    def process(group):
        if group.rank() == 0:
            Ranks(group).largest(0)

    with pytest.raises(ConnectionError, match="Another process of this run has ended"):
        in_threads(2, process)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["meta_batch=1"], "meta_batch=1 leaves some of 2 processes without a task"),
        (["optimizer=newton_cg"], "NewtonCG takes derivatives of the loss of the whole meta-batch"),
        (["optimizer=sophia_g"], "SophiaG takes derivatives of the loss of the whole meta-batch"),
    ],
)
def test_what_several_processes_cannot_compute_is_refused(composed, overrides, message):
    config = composed("device=cpu", *overrides)
    parts = build_parts(config)
    Ranks().check(config, parts)
    with pytest.raises(ValueError, match=message):
        in_threads(2, lambda group: Ranks(group).check(config, parts))


def test_processes_draw_different_random_numbers_and_find_them_again(composed, tmp_path):
    config, path = composed("device=cpu"), tmp_path / "last.pt"
    parts = build_parts(config)
    states = []
    for rank in range(2):
        torch.manual_seed(0)
        in_threads(rank + 1, lambda group, rank=rank: Ranks(group).seed(7) if group.rank() == rank else None)
        states.append(checkpoint.random_state())
    checkpoint.save(path, parts, step=3, config=plain(config), random=states)
    drawn = []
    for rank in range(3):  # the last one was not there when the state was saved
        torch.manual_seed(1)
        assert checkpoint.restore(checkpoint.load(path), parts, plain(config), rank) == 3
        drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == 3


# Tasks that are not finite


def parts_of(learner):
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    return SimpleNamespace(takes_closure=False, optimizer=optimizer, algorithm=learner, module=learner)


def root_loss(predictions, targets):
    return F.mse_loss(predictions, targets).sqrt()


def spoiled(part, tasks):
    """Return tasks, some with NaN or Inf in their losses, or only in their gradients, at a root of zero."""
    x = torch.randn(4, 2, 5, 2).double()
    y = torch.randn(4, 2, 5, 1).double()
    if part == "loss":
        x[tasks] = float("nan")
    else:
        x[tasks, 1], y[tasks, 1] = 0, 0
    return mg.tasks.Batch(mg.tasks.Examples(x[:, 0], y[:, 0]), mg.tasks.Examples(x[:, 1], y[:, 1]))


def rooted():
    model = torch.nn.Linear(2, 1, bias=False).double()
    return mg.MAML(model, root_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=1, nonfinite="skip")


@pytest.mark.parametrize("part", ["loss", "gradient"])
@pytest.mark.parametrize(("tasks", "alone"), [([3], []), ([2, 3], [1])])
def test_processes_go_on_without_the_tasks_of_one_that_are_not_finite(part, tasks, alone):
    batch, learner = spoiled(part, tasks), rooted()

    def process(group):
        own = Ranks(group)
        parts = parts_of(copy.deepcopy(learner))
        outs = [outer.step(parts, own.share(batch), lambda _: nullcontext(), own) for _ in range(2)]
        return outs, parts.module.state_dict()

    found = in_threads(2, process)
    parts = parts_of(copy.deepcopy(learner))
    for _ in range(2):
        outer.step(parts, batch, lambda _: nullcontext())
    assert [[out is None for out in outs] for outs, _ in found] == [[rank in alone] * 2 for rank in range(2)]
    for _, state in found:
        torch.testing.assert_close(dict(state), dict(parts.module.state_dict()), rtol=1e-12, atol=1e-12)


def test_a_process_that_has_no_finite_task_knows_the_metrics_of_the_others():
    batch, learner = spoiled("loss", [2, 3]), rooted()
    config = SimpleNamespace(algorithm=SimpleNamespace(nonfinite="skip"))

    def process(group):
        own, parts = Ranks(group), parts_of(copy.deepcopy(learner))
        run = SimpleNamespace(ranks=own, parts=parts, config=config, skipped=2 * own.rank)
        out = outer.step(parts, own.share(batch), lambda _: nullcontext(), own)
        return loop._train_metrics(run, own.share(batch), out), run.skipped

    found = in_threads(2, process)
    assert found[0] == found[1]
    out = learner(batch)
    expected = {
        "train/query_loss": out.loss.item(),
        "train/support_loss": out.support_losses[:2, 0].mean().item(),
    }
    assert found[0] == (pytest.approx({**expected, "train/skipped(tasks)": 2, "optimizer/lr": 0.1}), 0)


# Processes


def torchrun(*arguments, size, cwd, restarts=0):
    """Start processes. The errors of each process and of torchrun are in its stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("HYDRA_FULL_ERROR", None)
    options = ["--standalone", f"--nproc-per-node={size}", f"--max-restarts={restarts}"]
    options.append("--signals-to-handle=SIGTERM,SIGUSR1")  # that torchrun passes on
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "experiments.train"]
    return subprocess.Popen(
        [*command, *SETTINGS, *arguments],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def completed(process):
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run of two processes that nothing interrupts."""
    cwd = tmp_path_factory.mktemp("whole")
    code, errors = completed(torchrun("hydra.run.dir=run", size=2, cwd=cwd))
    assert code == 0, errors
    return cwd / "run"


def running(cwd, *arguments, rows=25, **options):
    """Start processes and wait until they have written some rows."""
    process, metrics = (
        torchrun("hydra.run.dir=run", *arguments, cwd=cwd, **options),
        cwd / "run" / "metrics.jsonl",
    )
    while len(read_rows(metrics)) < rows and process.poll() is None:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()
    return process


def workers(process):
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if b"experiments.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def assert_close(one, other):
    for a, b in zip(read_rows(one / "metrics.jsonl"), read_rows(other / "metrics.jsonl"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    for name, interval in results[0].pop("metrics").items():
        assert interval == pytest.approx(results[1]["metrics"][name], rel=1e-4)
    assert results[0].items() <= results[1].items()


@pytest.mark.slow
def test_two_processes_and_three_compute_what_one_does(composed, whole, tmp_path):
    with_plots = {
        "plots/learning_curve.png",
        "plots/adaptation.png",
        "train.log",
        "memory.txt",
    }
    assert all((whole / name).exists() for name in with_plots)
    assert json.loads((whole / "provenance.json").read_text())["processes"] == 2
    code, errors = completed(torchrun("hydra.run.dir=run", size=3, cwd=tmp_path))
    assert code == 0, errors
    (tmp_path / "one").mkdir()
    threads = torch.get_num_threads()
    run_job(composed(*SETTINGS, "threads=1"), tmp_path / "one")
    torch.set_num_threads(threads)
    assert_close(whole, tmp_path / "one")
    assert_close(tmp_path / "run", tmp_path / "one")


@pytest.mark.slow
def test_a_killed_process_ends_the_run_in_seconds_with_a_message(tmp_path):
    process = running(tmp_path, size=2)
    os.kill(sorted(workers(process))[1], signal.SIGKILL)
    start = time.monotonic()
    code, errors = completed(process)
    assert code != 0
    assert time.monotonic() - start < 25
    assert "-9" in errors  # torchrun names the process and the signal, and may stop the other processes first


@pytest.mark.slow
def test_processes_are_started_again_and_go_on_bit_for_bit(whole, tmp_path):
    process = running(tmp_path, size=2, restarts=1)
    os.kill(sorted(workers(process))[0], signal.SIGKILL)
    code, errors = completed(process)
    assert code == 0, errors
    same_outcome(tmp_path / "run", whole)
    resumed = json.loads((tmp_path / "run" / "provenance.json").read_text())["resumed"]
    assert [entry["step"] % 8 for entry in resumed] == [0]
    assert not (tmp_path / "run" / "failure.txt").exists()


@pytest.mark.slow
def test_a_signal_saves_and_one_process_goes_on(whole, tmp_path):
    process = running(tmp_path, "checkpoint.every=1000", size=2)
    process.send_signal(signal.SIGTERM)
    ended_by("SIGTERM", process, tmp_path)
    code, errors = completed(torchrun("resume=run", size=1, cwd=tmp_path))
    assert code == 0, errors
    assert_close(tmp_path / "run", whole)


def ended_by(name, process, cwd):
    code, errors = completed(process)
    assert code != 0
    assert f"Interrupted by {name} after" in errors
    assert f"Interrupted by {name} after" in (cwd / "run" / "failure.txt").read_text()
    assert 20 < checkpoint.load(cwd / "run" / checkpoint.FILE)["step"] < 60


# Checkpoints under SIGKILL


@pytest.mark.slow
def test_a_checkpoint_is_whole_whenever_its_process_is_killed(forks, tmp_path):
    chance = random.Random(0)
    for attempt in range(20):
        path, saved = tmp_path / str(attempt) / "last.pt", forks.Value("i", -1)
        process = forks.Process(target=save_for_ever, args=(path, saved))
        process.start()
        while saved.value < 0:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        state = checkpoint.load(path)
        assert state["step"] in (saved.value, saved.value + 1)
        assert torch.equal(state["model"]["weight"], torch.full((300, 300), float(state["step"])))
