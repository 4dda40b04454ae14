from __future__ import annotations

import json
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir

import metagrad as mg
from experiments.run.build import build_parts
from experiments.run.metrics import read_rows
from experiments.studies.curvature.__main__ import run_job
from experiments.studies.curvature.loading import load_model
from experiments.studies.curvature.measure import density_of, measure, row_of
from experiments.studies.curvature.problem import problem
from experiments.studies.curvature.schema import (
    Matrix,
    Objective,
    register_curvature,
    steps_of,
    training,
    typed,
)
from tests.experiments.conftest import REPOSITORY

TINY = (
    "logger=none",
    "device=cpu",
    "iterations=4",
    "meta_batch=2",
    "model.sizes=[1,5,5,1]",
    "algorithm.steps=2",
    "measure.count=3",
    "measure.tasks=3",
    "trace.probes=6",
    "eigenvalues.count=2",
    "density.steps=6",
    "density.probes=2",
)
FILES = [
    "provenance.json",
    "metrics.jsonl",
    "costs.jsonl",
    "densities.jsonl",
    "checkpoints/0.pt",
    "checkpoints/4.pt",
    "plots/density.png",
    "plots/traces.png",
    "plots/eigenvalues.png",
]


@pytest.fixture(scope="module")
def config():
    """Return a function from overrides to a typed config of a tiny run."""
    register_curvature()

    def build(*overrides, base=TINY):
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return typed(compose("curvature", [*base, *overrides]))

    return build


@pytest.fixture(scope="module")
def measured(config):
    """Return a function that runs a tiny job in a folder, draws only if it is told to, and returns its metrics."""

    def start(folder, *overrides, plots=False):
        folder.mkdir(parents=True, exist_ok=True)
        threads = torch.get_num_threads()
        try:
            with (
                nullcontext()
                if plots
                else mock.patch("experiments.studies.curvature.__main__.draw", return_value=[])
            ):
                run_job(config(*overrides), folder)
        finally:
            torch.set_num_threads(threads)
        return read_rows(folder / "metrics.jsonl")

    return start


@pytest.fixture(scope="module")
def tiny_run(measured, tmp_path_factory):
    """Return the folder of one finished run, not to be written to."""
    folder = tmp_path_factory.mktemp("curvature")
    measured(folder, plots=True)
    return folder


def parts_of(config, *overrides, seed=0):
    torch.manual_seed(seed)
    settings = config(*overrides)
    return build_parts(training(settings))


# A run


@pytest.mark.parametrize("name", FILES)
def test_a_run_leaves_its_files(tiny_run, name):
    assert (tiny_run / name).stat().st_size > 0


def test_every_measured_step_has_loss_traces_and_eigenvalues(tiny_run):
    rows = read_rows(tiny_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4]
    traces = {f"trace/{name}" for name in ("total", "model.0", "model.2", "model.4")}
    eigenvalues = {"eigenvalue/1", "eigenvalue/2"}
    assert set(rows[0]) == (
        {"step", "loss", "eigenvalue/lowest_seen"}
        | traces
        | {f"{name}_ci95" for name in traces}
        | eigenvalues
        | {f"{name}_residual" for name in eigenvalues}
    )
    assert rows[0]["loss"] != rows[2]["loss"]
    assert all(row["eigenvalue/1"] >= row["eigenvalue/2"] for row in rows)


def test_costs_count_products(tiny_run):
    rows = read_rows(tiny_run / "costs.jsonl")
    assert set(rows[0]) == {"step", "time/measurement(s)", "products", "memory/peak(MiB)"}
    assert all(row["products"] >= 6 + 6 + 2 + 12 for row in rows)


def test_densities_are_read_as_they_were_written(tiny_run):
    row = read_rows(tiny_run / "densities.jsonl")[0]
    density = density_of(row)
    assert density.n == 5 + 5 + 25 + 5 + 5 + 1
    assert density.nodes.shape == (2, 6)
    torch.testing.assert_close(density.weights.sum(1), torch.ones(2, dtype=torch.float64))
    assert {key: value for key, value in row.items() if key != "step"} == row_of(density)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(measured, tiny_run, tmp_path):
    written = (tiny_run / "metrics.jsonl").read_bytes()
    measured(tmp_path / "same")
    assert (tmp_path / "same" / "metrics.jsonl").read_bytes() == written
    measured(tmp_path / "other", "seed=1")
    assert (tmp_path / "other" / "metrics.jsonl").read_bytes() != written


def test_measuring_does_not_change_training(measured, tiny_run, tmp_path):
    rows = measured(tmp_path, "measure.steps=[4]")
    assert rows == read_rows(tiny_run / "metrics.jsonl")[-1:]


@pytest.mark.slow
def test_wandb_offline_mirrors_the_plots(measured, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    measured(tmp_path, "logger=wandb", "measure.steps=[0]", plots=True)
    images = tmp_path.glob("wandb/offline-run-*/files/media/images/plots/*")
    assert {path.name.partition("_")[0] for path in images} == {"density", "traces", "eigenvalues"}


# Checkpoints


def test_a_checkpoint_of_a_run_gives_the_values_of_its_step(measured, tiny_run, tmp_path):
    rows = measured(tmp_path, f"checkpoint={tiny_run / 'checkpoints' / '4.pt'}", "seed=0")
    assert rows == read_rows(tiny_run / "metrics.jsonl")[-1:]


def test_a_plain_state_dict_is_that_of_the_model(measured, tiny_run, tmp_path):
    state = torch.load(tiny_run / "checkpoints" / "4.pt", weights_only=True)["model"]
    torch.save({name.removeprefix("model."): value for name, value in state.items()}, tmp_path / "mine.pt")
    (row,) = measured(tmp_path, f"checkpoint={tmp_path / 'mine.pt'}")
    assert row == {**read_rows(tiny_run / "metrics.jsonl")[-1], "step": 0}


def test_a_run_folder_of_train_is_a_checkpoint(measured, run, tmp_path):
    trained = run(tmp_path / "trained", "model.sizes=[1,5,5,1]")
    (row,) = measured(tmp_path / "measured", f"checkpoint={trained}")
    assert row["step"] == 4


BAD_FILES = {
    "not there": (None, r"checkpoint: there is no file .*bad\.pt"),
    "no torch file": (b"abc", r"checkpoint: .*bad\.pt is not a readable checkpoint"),
    "a tensor": (torch.zeros(2), r"checkpoint: .*bad\.pt holds a Tensor, expected a dict of tensors"),
    "nothing": ({}, r"checkpoint: .*bad\.pt holds a dict, expected a dict of tensors"),
    "a wrapped one": (
        {"epoch": 3, "state_dict": {}},
        r"neither a checkpoint of a run nor a state dict: no tensors are its epoch, state_dict\. Save model",
    ),
    "another model": (
        {"0.weight": torch.zeros(5, 2)},
        r"is of another model: 0\.weight is \[5, 2\] there and \[5, 1\] here, 0\.bias is absent there and \[5\] "
        r"here, .*, and 1 more\. Set model=\.\.\. and task=",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_is_no_checkpoint_is_refused(config, tmp_path, name):
    content, message = BAD_FILES[name]
    file = tmp_path / "bad.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ValueError, match=message):
        load_model(str(file), parts_of(config))


# What the curvature is of, against dense Hessians of plain torch


@pytest.fixture
def small(config):
    """Return a learner in float64 and a batch of two tasks."""
    parts = parts_of(config, "model.sizes=[1,3,1]")
    parts.module.double()
    batch = mg.tasks.Sinusoid(shots=4, queries=3, dtype=torch.float64).sample(
        2, generator=torch.Generator().manual_seed(0)
    )
    return parts, batch


def network(flat, x):
    hidden = torch.relu(x @ flat[:3].reshape(1, 3) + flat[3:6])
    return hidden @ flat[6:9].reshape(3, 1) + flat[9:]


def adapted(flat, batch, task):
    """Take two steps of gradient descent at 0.01 by hand."""
    for _ in range(2):
        loss = F.mse_loss(network(flat, batch.support.x[task]), batch.support.y[task])
        flat = flat - 0.01 * torch.autograd.grad(loss, flat, create_graph=True)[0]
    return flat


def judged(flat, batch, task):
    return F.mse_loss(network(flat, batch.query.x[task]), batch.query.y[task])


def expected_hessian(objective, flat, batch):
    if objective is Objective.supervised:
        support = batch.support
        return torch.autograd.functional.hessian(
            lambda p: F.mse_loss(network(p, support.x[0]), support.y[0]), flat
        )
    if objective is Objective.meta:

        def loss(p):
            return sum(judged(adapted(p, batch, task), batch, task) for task in range(2)) / 2

        return torch.autograd.functional.hessian(loss, flat)
    points = [adapted(flat, batch, task).detach() for task in range(2)]
    return (
        sum(
            torch.autograd.functional.hessian(lambda p, task=task: judged(p, batch, task), point)
            for task, point in enumerate(points)
        )
        / 2
    )


@pytest.mark.parametrize("objective", Objective)
def test_the_hessian_is_that_of_the_objective(small, objective):
    parts, batch = small
    flat = torch.cat([p.detach().reshape(-1) for p in parts.module.parameters()]).requires_grad_()
    with problem(objective, parts, F.mse_loss, batch).operator(Matrix.hessian) as H:
        torch.testing.assert_close(H.to_dense(), expected_hessian(objective, flat, batch))


@pytest.mark.parametrize(
    ("objective", "matrix"), list(zip(Objective, [Matrix.ggn, Matrix.fisher, Matrix.ggn], strict=True))
)
def test_gauss_newton_is_that_of_the_predictions(small, objective, matrix):
    parts, batch = small
    now = problem(objective, parts, F.mse_loss, batch)
    jacobian = torch.autograd.functional.jacobian(
        lambda *values: now.predict(dict(zip(now.params, values, strict=True)), now.x).flatten(),
        tuple(p.detach() for p in now.params.values()),
    )
    J = torch.cat([part.flatten(1) for part in jacobian], 1)
    with now.operator(matrix) as G:
        torch.testing.assert_close(G.to_dense(), 2 / len(J) * J.t() @ J)


@pytest.mark.parametrize(
    ("objective", "matrix"), [("meta", "ggn"), ("adapted", "fisher"), ("supervised", "ggn")]
)
def test_every_matrix_of_every_objective_runs(measured, tmp_path, objective, matrix):
    (row,) = measured(tmp_path, f"objective={objective}", f"matrix={matrix}", "measure.steps=[1]")
    assert row["eigenvalue/lowest_seen"] > -1e-4 * row["eigenvalue/1"]  # positive semi-definite, in float32


# Settings


def test_steps_are_even_on_a_logarithmic_axis(config):
    assert steps_of(config("iterations=1000", "measure.count=4")) == [0, 10, 100, 1000]
    assert steps_of(config("iterations=2", "measure.count=9")) == [0, 1, 2]


BAD_SETTINGS = {
    "+measure.every=3": r"curvature: there is no key measure\.every; the keys there are steps, count, tasks",
    "measure.count=1": r"curvature: measure\.count must be at least 2, got 1",
    "trace.probes=5": r"curvature: trace\.probes must be at least 6, got 5",
    "measure.steps=[0,9]": r"measure\.steps must be some of 0 to iterations = 4, got \[0, 9\]",
    "measure.steps=[]": r"measure\.steps must be some of 0 to iterations = 4, got \[\]",
    "algorithm.order=1": r"objective=meta .* so algorithm\.order must be 2 .* got 1 and None\. Set objective=adapted",
    "algorithm.truncate=1": r"algorithm\.truncate null, got 2 and 1",
}


@pytest.mark.parametrize("override", BAD_SETTINGS)
def test_bad_settings_are_refused(config, override):
    with pytest.raises(ValueError, match=BAD_SETTINGS[override]):
        config(override)


def test_first_order_is_fine_where_adaptation_is_not_differentiated(config):
    assert config("algorithm.order=1", "objective=adapted").algorithm.order == 1


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (REPOSITORY / "conf" / "problem").glob("*.yaml"))
)
def test_every_problem_composes(config, name):
    settings = config(f"problem={name}", base=())
    assert len(build_parts(training(settings)).module.state_dict()) > 0
    assert steps_of(settings)[-1] == settings.iterations


def test_a_hessian_through_batch_norm_is_that_of_the_norm_written_out(config):
    """A third derivative of the model, of which torch's own is wrong."""
    settings = config("problem=omniglot_maml", "model.norm=batch", "model.hidden=4", base=())
    x, y = torch.randn(1, 5, 1, 28, 28), torch.arange(5)[None]
    batch = mg.tasks.Batch(mg.tasks.Examples(x, y), mg.tasks.Examples(x, y))
    now = problem(Objective.meta, build_parts(training(settings)), F.cross_entropy, batch)
    H = now.operator(Matrix.hessian)
    with mg.models.composite_norms():
        expected = now.operator(Matrix.hessian)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(0))
    error = (H @ v - expected @ v).norm() / (expected @ v).norm()
    assert error < 1e-3, error


# The program


@pytest.mark.slow
def test_the_program_runs_and_reports(program, tmp_path):
    code, _, err = program("studies.curvature", *TINY, "measure.steps=[0]", "hydra.run.dir=run", cwd=tmp_path)
    assert code == 0, err
    log = (tmp_path / "run" / "curvature.log").read_text()
    assert "trace (95 %)" in log
    assert "Plots: run/plots/density.png" in log
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["seed"] == 0


@pytest.mark.slow
def test_a_missing_checkpoint_is_one_clear_line_and_a_failure(program, tmp_path):
    code, _, err = program(
        "studies.curvature", *TINY, "checkpoint=none.pt", "hydra.run.dir=run", cwd=tmp_path
    )
    assert code != 0
    assert any(line.startswith("checkpoint: there is no file none.pt.") for line in err.splitlines())
    assert "Traceback" not in err
    assert (tmp_path / "run" / "failure.txt").read_text() == "checkpoint: there is no file none.pt.\n"


def test_the_small_preset_is_small(config):
    small = config("preset=small", base=("logger=none",))
    assert (small.iterations, small.measure.count, small.eigenvalues.max_products) == (20, 3, 40)


def test_the_progress_of_a_measurement_names_its_parts(config):
    parts = []
    settings = config()
    torch.manual_seed(0)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    with mg.hessian((w**4).sum(), {"w": w}) as operator:
        measure(operator, settings, 0, parts.append)
    assert parts == ["trace", "traces of layers", "eigenvalues", "density"]
