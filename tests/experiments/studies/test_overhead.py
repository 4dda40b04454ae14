"""What an order costs: every way to a derivative against plain torch, the cells of the grid, the tables."""

from __future__ import annotations

import csv
import json
import warnings
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from torch import nn

from experiments.run.help import CONF
from experiments.studies.overhead import cells, listings, worker
from experiments.studies.overhead.methods import (
    GRADIENT,
    META,
    PRODUCT,
    SECOND,
    TRACE,
    WAYS,
    prepared,
    remedies,
)
from experiments.studies.overhead.models import MODELS, citations, load
from experiments.studies.overhead.report import report
from experiments.studies.overhead.rows import as_csv, rows_of
from experiments.studies.overhead.run import at_once, flat
from experiments.studies.overhead.schema import register_overhead, typed
from experiments.studies.overhead.work import DENSE, Size
from experiments.studies.overhead.worker import Request, Row, answer
from tests.marks import slow

SIZES = {
    "mlp": Size(3, 4, 8),
    "convnet": Size(2, 3, 4),
    "transformer": Size(1, 8, 4),
    "graph": Size(2, 4, 90),
    "table": Size(1, 3, 8),
}
INEXACT = {"bfloat16", "finite difference", "Hutchinson", "first order", "half the bytes"}


def is_exact(model, quantity, remedy):
    """Say whether a remedy changes nothing; the others are refused, or wrong, see the tables of the program."""
    needs_hessian = quantity == PRODUCT or (quantity, remedy) == (SECOND, "accumulated")
    if model == "table" and needs_hessian and remedy not in (DENSE, "finite difference"):
        return False  # curvature takes dense gradients
    refused = {
        "accumulated": model == "graph",  # nodes are not independent
        "mg.checkpoint": model == "table" and quantity in (PRODUCT, META),
        "torch checkpoint": quantity == META,
    }
    return not refused.get(remedy, remedy in INEXACT or "compiled" in remedy)


EXACT = [
    (model, quantity, remedy)
    for model in MODELS
    for quantity in WAYS
    for remedy in remedies(quantity, model)
    if is_exact(model, quantity, remedy)
]
LEFT = ("forward over reverse", "auto", "sqrt", "textbook loop", "torch checkpoint")


def of_kind(cases):
    """Leave to the slow tests what the MLP does not show, and what other tests of the library are of."""
    return [case if case[0] == "mlp" and case[2] not in LEFT else slow(*case) for case in cases]


def work_of(model, steps=2):
    work = load(model, SIZES[model], 0, torch.device("cpu")).to(torch.float64)
    return replace(work, steps=steps)


def computed(work, quantity, remedy):
    run = prepared(quantity, remedy, work)
    return flat(run.finish(run.hold()))


def by_torch(work, quantity):
    """Compute with torch.func and the textbook's loop alone."""
    params = {name: p.detach() for name, p in work.params.items()}

    def loss(params):
        return work.loss(params, work.x, work.y)

    gradient = torch.func.grad(loss)
    if quantity == GRADIENT:
        return flat(gradient(params))
    if quantity in (SECOND, PRODUCT):
        return flat(torch.func.vjp(gradient, params)[1](gradient(params))[0])
    if quantity == META:
        return flat(torch.func.grad(lambda p: adapted(work, p))(params))
    head = {name: params[name] for name in work.head}
    hessian = torch.func.hessian(lambda head: loss({**params, **head}))(head)
    rows = [torch.cat([block.reshape(head[a].numel(), -1) for block in hessian[a].values()], 1) for a in head]
    matrix = torch.cat(rows)
    return flat(matrix.trace() if quantity == TRACE else matrix)


def adapted(work, params):
    for _ in range(work.steps):
        grads = torch.func.grad(lambda p: work.loss(p, work.x, work.y))(params)
        params = {name: p - 0.05 * grads[name] for name, p in params.items()}
    return work.loss(params, work.query_x, work.query_y)


@pytest.mark.parametrize(("model", "quantity", "remedy"), of_kind(EXACT))
def test_every_way_gives_the_same(model, quantity, remedy):
    work = work_of(model)
    torch.testing.assert_close(
        computed(work, quantity, remedy), by_torch(work, quantity), rtol=1e-9, atol=1e-11
    )


def test_torch_checkpoint_is_wrong_through_inner_steps():
    """It recomputes with the weights that the module has in the backward pass, which are not those of the step."""
    work = work_of("mlp")
    exact = by_torch(work, META)
    assert (computed(work, META, "torch checkpoint") - exact).norm() > 1e-4 * exact.norm()


@pytest.mark.parametrize(("quantity", "remedy"), [(PRODUCT, "finite difference"), (META, "first order")])
def test_what_is_not_exact_is_near(quantity, remedy):
    work = work_of("mlp")
    exact = by_torch(work, quantity)
    assert 0 < (computed(work, quantity, remedy) - exact).norm() < 0.2 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_is_near(model):
    work = work_of(model)
    exact = by_torch(work, SECOND)
    assert (computed(work, SECOND, "bfloat16") - exact).norm() < 0.2 * exact.norm()


def test_without_cora_there_is_a_graph_of_its_size(monkeypatch, tmp_path):
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path))
    edges, x, y = citations(271)
    assert (edges.shape, tuple(x.shape), tuple(y.shape)) == ((271, 271), (271, 1433), (271,))
    assert 271 < edges.nnz <= 271 + 2 * 528


# What is measured


def test_rows_have_bytes_seconds_and_errors():
    request = Request("mlp", SIZES["mlp"], (2,), ((GRADIENT, ""), (SECOND, ""), (META, "dense")), 2, 0.0)
    gradient, second, dense = answer(request)
    assert gradient.error == second.error == 0
    assert 0 < gradient.held < second.held < second.peak
    assert gradient.steps == 2
    assert len(gradient.seconds) == len(second.seconds) == 2
    assert dense.note == "ValueError: there is nothing sparse in the model"
    assert dense.seconds == []


def test_a_warning_that_something_else_is_done_is_a_refusal(monkeypatch):
    def warned(*_):
        warnings.warn("unroll(...): every step's graph is stored.", stacklevel=1)
        return at_once(lambda: torch.zeros(1))

    monkeypatch.setattr(worker, "prepared", warned)
    row = Row(META, "step", 1)
    assert worker.started(row, work_of("mlp"), {}) is None
    assert row.note == "ValueError: unroll(...): every step's graph is stored."


# The grid


@pytest.fixture(scope="module")
def config():
    """Return a function from overrides to a typed config."""
    register_overhead()

    def build(*overrides):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return typed(compose("overhead", ["logger=none", *overrides]))

    return build


@pytest.fixture
def grid(config, tmp_path, monkeypatch):
    """Return a small config, and the requests that processes were asked, which answer with made-up numbers."""
    small, asked = config("preset=small", f"folder={tmp_path}"), []

    def answered(module, line, **_):
        request = json.loads(line)
        asked.append(request)
        if request["model"] == "table":
            return {"refused": "took longer than 1 s"}
        pairs = [(steps, *method) for steps in request["steps"] for method in request["methods"]]
        return {"rows": [made_up(*pair) for pair in pairs]}

    monkeypatch.setattr(cells, "answered", answered)
    return small, asked


def made_up(steps, quantity, remedy):
    if remedy == "auto":
        return asdict(Row(quantity, remedy, steps, note="ValueError: no."))
    more = 2 if remedy else 1
    return asdict(
        Row(
            quantity, remedy, steps, 1000, more * 2**20, 0.1 * bool(remedy), 0.1, [more * 0.001, more * 0.004]
        )
    )


def test_cells_are_measured_once(grid):
    small, asked = grid
    every = list(cells.cells(small, "cpu"))
    assert [cell.name for cell in every] == [
        "mlp-base-4-16-16", "table-base-1-8-64", "mlp-steps-4-16-16", "table-steps-1-8-64", "mlp-depth-2-16-16",
    ]  # fmt: skip
    assert [cells.measure(cell, small) for cell in every] == [
        "",
        "took longer than 1 s",
        "",
        "took longer than 1 s",
        "",
    ]
    assert [request["steps"] for request in asked] == [[4], [4], [1, 4], [1, 4], [4]]
    assert [cells.measure(cell, small) for cell in every if cell.request.model == "mlp"] == [""] * 3
    assert len(asked) == 5
    small.rounds = 7
    with pytest.raises(
        ValueError, match=r"mlp-base-4-16-16\.json was measured with other settings; choose another"
    ):
        cells.measure(next(cells.cells(small, "cpu")), small)


def test_compiled_code_has_a_cell_of_the_least_depth(config):
    *_, cell = cells.cells(config("models=[mlp]", "compiled=[mlp]"), "cpu")
    assert (cell.axis, cell.request.size) == ("compiled", (4, 64, 128))
    assert set(cell.request.methods) >= {(GRADIENT, ""), (SECOND, "compiled"), (META, "step, compiled")}


def test_tables_are_made_of_cells(grid):
    small, _ = grid
    every = list(cells.cells(small, "cpu"))
    lost = [f"- {cell.name}: {reason}" for cell in every if (reason := cells.measure(cell, small))]
    rows = [row for cell in every if "mlp" in cell.name for row in rows_of(cells.read(cell, small))]
    text = report(rows, lost)
    assert "| gradient | 1 MiB, 2.5 ms |" in text
    assert "| mg.checkpoint | 2.00, 2.00, off by 0.1 |" in text
    assert "| auto | refused |" in text
    assert "- mlp, meta-gradient, auto: ValueError: no." in text
    assert "| mlp, step | 2 | 2 |" in text
    assert "- table-base-1-8-64: took longer than 1 s" in text
    first, *_ = csv.DictReader(as_csv(rows).splitlines())
    assert (first["model"], first["quantity"], float(first["seconds/gradients"])) == ("mlp", GRADIENT, 1)


BAD_SETTINGS = {
    "models=[rnn]": r"overhead: models must be some of mlp, convnet, .*, with sizes, got rnn",
    "inner_steps=0": r"overhead: inner_steps must be at least 1, got 0",
    "sizes.mlp.width=[]": r"overhead: sizes\.mlp\.width must be at least 1, got 0",
    "+sizes.mlp.heads=[1]": r"overhead: there is no key sizes\.mlp\.heads; the keys there are depth, width, batch",
}


@pytest.mark.parametrize("override", BAD_SETTINGS)
def test_bad_settings_are_refused(config, override):
    with pytest.raises(ValueError, match=BAD_SETTINGS[override]):
        config(override)


# Listings


def test_the_listing_has_the_gradient_of_a_model_that_never_adapts():
    torch.manual_seed(0)
    batch, model = listings.tasks(0), nn.Linear(10, 1).double()
    plain = F.mse_loss(model(batch.query.x), batch.query.y)
    pairs = [
        torch.autograd.grad(loss, list(model.parameters()))
        for loss in (plain, listings.listed_loss(model, batch))
    ]
    for expected, got in zip(*pairs, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_listings_are_tables():
    text = listings.text()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# Listings", "## A second derivative", "## MAML", "## Differences of gradients",
    ]  # fmt: skip
    assert "by the listing" in text


# The program


@pytest.mark.slow
def test_the_program_ends_and_goes_on_where_it_ended(program, tmp_path):
    arguments = ["preset=small", "logger=none", "folder=run", "device=cpu"]
    code, out, err = program("studies.overhead", *arguments, cwd=tmp_path)
    assert code == 0, err
    assert "## Remedies" in out
    files = {"overhead.md", "overhead.csv", "overhead.json", "overhead.png", "listings.md", "provenance.json"}
    assert files <= {path.name for path in (tmp_path / "run").iterdir()}
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "cells").iterdir()}
    assert len(written) == 5
    code, again, err = program("studies.overhead", *arguments, cwd=tmp_path)
    assert (code, again) == (0, out), err
    assert {path: path.stat().st_mtime_ns for path in written} == written
