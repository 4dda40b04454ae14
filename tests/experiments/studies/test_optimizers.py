from __future__ import annotations

import functools
import inspect
import json
import math
import os
import shutil
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import metagrad as mg
from experiments.compare import find_jobs
from experiments.run import outer
from experiments.run.build import build, build_optimizer, build_parts
from experiments.run.loop import Run, outer_step
from experiments.run.metrics import read_rows
from experiments.run.optimizer_schemas import OPTIMIZERS
from experiments.run.plots.optimizers import losses, spread
from experiments.studies.characters import Examples
from experiments.studies.optimizers import workload
from experiments.studies.optimizers.__main__ import run_job, start
from experiments.studies.optimizers.building import Stepper, split_for_muon
from experiments.studies.optimizers.compare import by_workload, finished, label_of, read_curve, report, table
from experiments.studies.optimizers.cost import FlopCounter
from experiments.studies.optimizers.models import INPUTS_OF_A_UNIT, Autoencoder, sparse_linear
from experiments.studies.optimizers.schema import register_optimizers, typed
from experiments.studies.optimizers.training import advance, flops_of_gradient
from experiments.studies.optimizers.workload import Problem, batches, problem
from tests.experiments.conftest import REPOSITORY
from tests.marks import fast, slow

FILE = Path(os.environ.get("METAGRAD_DATA", "")) / "omniglot" / "omniglot_105_bits.npz"
CPU = torch.device("cpu")
NAMES = list(OPTIMIZERS)
FILES = sorted(
    path.stem for path in (REPOSITORY / "conf" / "optimizer").glob("*.yaml") if path.stem != "custom"
)
TINY = (
    "logger=none",
    "device=cpu",
    "budget=6",
    "evaluations=3",
    "workload.batch_size=8",
    "workload.judged=16",
    "workload.data.count=4",
    "workload.data.held_out=3",
    "batch_size=8",
)
SMALL = {
    "autoencoder": ("workload.model.sizes=[784,20,6]",),
    "classifier": ("workload.model.sizes=[784,12,4]",),
    "conv4": ("workload.model.hidden=4",),
    "transformer": ("workload.model.width=8", "workload.model.depth=1"),
    "logistic": (),
}


@pytest.fixture(scope="module", autouse=True)
def characters():
    """Take four characters of random ink for Omniglot's, and return how those are loaded."""
    source = torch.Generator().manual_seed(0)
    ink = (torch.rand(4, 20, 28, 28, generator=source) < 0.1).float()
    real = workload.drawings

    def drawings(config):
        return ink[: config.count]

    with mock.patch.object(workload, "drawings", drawings):
        yield real


@pytest.fixture(scope="module")
def config():
    """Return a function from overrides to a typed config of a tiny run."""
    register_optimizers()

    @functools.cache
    def build_config(*overrides, base=TINY):
        name = next((o.partition("=")[2] for o in overrides if o.startswith("workload=")), "autoencoder")
        every = [*(base and (*base, *SMALL[name])), *overrides]
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            return typed(compose("optimizers", every), every)

    return build_config


@pytest.fixture(scope="module")
def trained(config):
    """Return a function that runs a tiny job in a folder, draws only if told to, and returns its metrics' rows."""

    def begin(folder, *overrides, base=TINY, plots=False):
        folder.mkdir(parents=True, exist_ok=True)
        threads = torch.get_num_threads()
        try:
            with nullcontext() if plots else mock.patch("experiments.studies.optimizers.__main__.losses"):
                run_job(config(*overrides, base=base), folder)
        finally:
            torch.set_num_threads(threads)
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {o}\n" for o in overrides))
        return read_rows(folder / "metrics.jsonl")

    return begin


# What a step costs


def counted(fn, *inputs):
    with FlopCounter() as counter:
        fn(*inputs)
    return counter.flops


N, M = 6, 4
SYMMETRIC = 3 * torch.eye(N) + 0.1
COSTS = {
    "product": (lambda: SYMMETRIC @ torch.ones(N, M), 2 * N * N * M),
    "cholesky": (lambda: torch.linalg.cholesky(SYMMETRIC), N**3 // 3),
    "cholesky_inverse": (lambda: torch.cholesky_inverse(SYMMETRIC), 2 * N**3 // 3),
    "inv": (lambda: torch.linalg.inv(SYMMETRIC), 2 * N**3),
    "eigh": (lambda: torch.linalg.eigh(SYMMETRIC), 9 * N**3),
    "eigh of a batch": (lambda: torch.linalg.eigh(SYMMETRIC.expand(2, 5, N, N)), 10 * 9 * N**3),
    "svd": (lambda: torch.linalg.svd(torch.ones(N, M)), 4 * N**2 * M + 8 * N * M**2 + 9 * M**3),
    "wide svd": (lambda: torch.linalg.svd(torch.ones(M, N)), 4 * N**2 * M + 8 * N * M**2 + 9 * M**3),
    "qr": (lambda: torch.linalg.qr(SYMMETRIC), 8 * N**3 // 3),
    "tall qr": (lambda: torch.linalg.qr(torch.ones(9, 3)), 4 * 9 * (9 - 1)),
    "solve": (lambda: torch.linalg.solve(SYMMETRIC, torch.ones(N, M)), 2 * N**3 // 3 + 2 * N**2 * M),
    "solve for a vector": (lambda: torch.linalg.solve(SYMMETRIC, torch.ones(N)), 2 * N**3 // 3 + 2 * N**2),
}


@pytest.mark.parametrize("name", COSTS)
def test_operations_are_counted_by_their_formulas(name):
    compute, flops = COSTS[name]
    assert counted(compute) == flops


def test_counts_are_those_of_torch(config):
    """On a model with convolutions and normalisation, forwards and backwards."""
    now = problem(config("workload=conv4").workload, 0, CPU)
    with FlopCounterMode(display=False) as theirs:
        now.loss(now.train).backward()
    assert counted(lambda: now.loss(now.train).backward()) == theirs.get_total_flops() > 0


BATCH, INPUTS, OUTPUTS = 8, 5, 3
PRODUCT = 2 * BATCH * INPUTS * OUTPUTS  # operations of one product of a linear layer


@pytest.fixture
def linear():
    """Return the problem of one linear layer on cross-entropies of elements, and a batch of it."""
    torch.manual_seed(0)
    examples = Examples(torch.randn(BATCH, INPUTS), torch.rand(BATCH, OUTPUTS))
    return Problem(
        nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False)), True, examples, examples, examples
    ), examples


def test_a_gradient_is_a_forward_and_a_backward_product(linear):
    # The first layer has no gradient of its inputs.
    assert flops_of_gradient(*linear) == 2 * PRODUCT


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "lbfgs"])
def test_a_step_of_the_first_order_costs_a_gradient(config, linear, name):
    now, examples = linear
    others = ["optimizer.line_search_fn=null"] if name == "lbfgs" else []
    step = Stepper(config(f"optimizer={name}", *others).optimizer, now)
    assert counted(step, examples) == flops_of_gradient(now, examples)


def test_a_step_of_kfac_is_counted_by_hand(config, linear):
    now, examples = linear
    every = ("optimizer.curvature_every=2", "optimizer.inverse_every=4", "optimizer.eigen=false")
    step = Stepper(config("optimizer=kfac", "optimizer.fisher=empirical", *every).optimizer, now)
    gradient = 2 * PRODUCT
    factors = 2 * BATCH * (INPUTS**2 + OUTPUTS**2)
    inverses = sum(round(n**3 / 3) + round(2 * n**3 / 3) for n in (INPUTS, OUTPUTS))
    directions = 2 * OUTPUTS**2 * INPUTS + 2 * OUTPUTS * INPUTS**2
    assert counted(step, examples) == gradient + factors + inverses + directions
    assert counted(step, examples) == gradient + directions  # the factors are due at every second step
    assert counted(step, examples) == gradient + factors + directions  # their inverses at every fourth


@pytest.mark.parametrize("products", [1, 2, 5])
def test_a_step_of_newtons_method_costs_products(config, linear, products):
    """A product with the Gauss-Newton matrix is one with J and one with its transpose, by a double backward."""
    now, examples = linear
    settings = config(
        "optimizer=gauss_newton",
        "optimizer.curvature_batch=null",
        f"optimizer.max_steps={products}",
        "optimizer.progress=null",
        "optimizer.adapt=false",
        "optimizer.warm_start=0",
    ).optimizer
    cost = counted(Stepper(settings, now), examples)
    assert cost >= 2 * PRODUCT + products * 2 * PRODUCT
    assert cost <= 2 * PRODUCT + products * 4 * PRODUCT


def test_curvature_of_a_part_costs_a_part(config, linear):
    now, examples = linear
    half = [
        counted(
            Stepper(
                config("optimizer=gauss_newton", f"optimizer.curvature_batch={size}", *FIXED).optimizer, now
            ),
            examples,
        )
        for size in (BATCH, BATCH // 2)
    ]
    whole_gradient, part_gradient = 2 * PRODUCT, PRODUCT
    assert (half[0] - 2 * whole_gradient) == 2 * (half[1] - whole_gradient - part_gradient)


FIXED = (
    "optimizer.max_steps=3",
    "optimizer.progress=null",
    "optimizer.adapt=false",
    "optimizer.warm_start=0",
)


@pytest.mark.parametrize("name", fast(("adam", "sgd", "adahessian", "kfac", "lbfgs", "newton_cg"), NAMES))
def test_counting_changes_no_number(config, name):
    """Two steps of every optimizer, with the counter and without."""
    settings, moved = config(f"optimizer={name}"), []
    assert json.dumps(settings.tuned)
    for is_counted in (False, True):
        torch.manual_seed(0)
        now = problem(settings.workload, 0, CPU)
        step = Stepper(settings.optimizer, now)
        stream = batches(now.train, 8, 0)
        for _ in range(2):
            counted(step, next(stream)) if is_counted else step(next(stream))
        moved.append([p.detach().clone() for p in now.model.parameters()])
    for plain, seen in zip(*moved, strict=True):
        assert torch.equal(plain, seen)


# Runs


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_lowers_the_loss_of_the_autoencoder(trained, tmp_path, name):
    rows = trained(tmp_path, f"optimizer={name}")
    assert rows[-1]["loss/train"] < rows[0]["loss/train"]
    assert rows[-1]["gradient_equivalents"] >= 6


@pytest.mark.filterwarnings("ignore:KFAC")
@pytest.mark.parametrize(
    "name", fast(("kfac",), ["adam", "adahessian", "sophia_g", "shampoo", "kfac", "gauss_newton"])
)
def test_optimizers_train_the_convolutional_classifier(trained, tmp_path, name):
    rows = trained(tmp_path, "workload=conv4", f"optimizer={name}")
    assert {"loss/train", "loss/test", "accuracy/train(%)", "accuracy/test(%)"} <= set(rows[-1])


@pytest.mark.parametrize("name", ["muon", slow("kfac"), "gauss_newton", slow("sgd")])
def test_optimizers_train_the_classifier(trained, tmp_path, name):
    rows = trained(tmp_path, "workload=classifier", f"optimizer={name}")
    assert 0 <= rows[-1]["accuracy/test(%)"] <= 100


@pytest.fixture(scope="module")
def tiny_run(trained, tmp_path_factory):
    """Return the folder of one finished run, not to be written to."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    trained(folder, "optimizer=sgd", plots=True)
    return folder


@pytest.mark.parametrize(
    "name",
    ["provenance.json", "settings.json", "metrics.jsonl", "costs.jsonl", "result.json", "plots/loss.png"],
)
def test_a_run_leaves_its_files(tiny_run, name):
    assert (tiny_run / name).stat().st_size > 0


def test_evaluations_are_even_in_gradient_equivalents(tiny_run):
    rows = read_rows(tiny_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert [row["gradient_equivalents"] for row in rows] == [0.0, 2.0, 4.0, 6.0]
    assert set(rows[0]) == {"step", "loss/train", "loss/test", "gradient_equivalents"}


def test_the_result_has_metrics_and_costs(tiny_run):
    outcome = json.loads((tiny_run / "result.json").read_text())
    last = read_rows(tiny_run / "metrics.jsonl")[-1]
    assert outcome["metrics"]["loss/train"] == {"mean": last["loss/train"]}
    assert (outcome["diverged"], outcome["costs"]["steps"]) == (False, 6)
    assert outcome["costs"]["gradients_of_a_step"] == 1.0


def test_a_larger_batch_costs_more(trained, tmp_path):
    rows = trained(tmp_path, "optimizer=sgd", "batch_size=16")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["gradient_equivalents"] for row in rows] == [0.0, 2.0, 4.0, 6.0]


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(trained, tiny_run, tmp_path):
    written = (tiny_run / "metrics.jsonl").read_bytes()
    trained(tmp_path / "same", "optimizer=sgd")
    assert (tmp_path / "same" / "metrics.jsonl").read_bytes() == written
    trained(tmp_path / "other", "optimizer=sgd", "seed=1")
    assert (tmp_path / "other" / "metrics.jsonl").read_bytes() != written


def test_all_optimizers_start_from_the_same_model(trained, tmp_path):
    short = ("budget=1", "evaluations=1")
    first = [trained(tmp_path / name, f"optimizer={name}", *short)[0] for name in ("sgd", "kfac", "muon")]
    assert first[0] == first[1] == first[2]


def test_a_run_whose_loss_is_not_finite_ends_and_says_so(trained, tmp_path):
    rows = trained(tmp_path, "workload=classifier", "optimizer=sgd", "optimizer.lr=1e30")
    outcome = json.loads((tmp_path / "result.json").read_text())
    assert outcome["diverged"]
    assert outcome["costs"]["steps"] < 6
    assert math.isfinite(rows[-1]["loss/train"])


def test_a_decomposition_of_what_is_not_finite_is_divergence(config, tmp_path):
    settings = config("optimizer=kfac")
    now = problem(settings.workload, 0, CPU)

    class Journal:
        def write(self, *_):
            pass

    run = start(settings, now, Journal())  # type: ignore[arg-type]

    def fails(_):
        raise torch.linalg.LinAlgError("not positive definite")

    run.step = fails
    assert not advance(run)


@pytest.mark.slow
@pytest.mark.skipif(not FILE.is_file(), reason="$METAGRAD_DATA/omniglot/omniglot_105_bits.npz is missing")
def test_kfac_is_ahead_of_adam_on_the_deep_autoencoder(trained, tmp_path, monkeypatch, characters):
    """At a sixth of the budget; the whole of it is in docs/optimizers_compared.md."""
    monkeypatch.setattr(workload, "drawings", characters)  # Omniglot's own
    settings = ("logger=none", "device=cpu", "budget=80", "evaluations=1")
    losses = [
        trained(tmp_path / name, f"optimizer={name}", *settings, base=())[-1]["loss/train"]
        for name in ("kfac", "adam")
    ]
    assert losses[0] < losses[1] < 175


# Data and models


def test_no_training_drawing_is_in_the_test(config):
    now = problem(config("workload=classifier").workload, 0, CPU)
    assert (len(now.train.x), len(now.test.x)) == (4 * 17, 4 * 3)
    assert now.test.y.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert not (now.train.x[:, None] == now.test.x[None]).all(-1).any()


def test_the_judged_examples_are_training_examples(config):
    now = problem(config("workload=classifier").workload, 0, CPU)
    found = (now.judged.x[:, None] == now.train.x[None]).all(-1)
    assert found.any(1).all()
    assert torch.equal(now.train.y[found.float().argmax(1)], now.judged.y)


def test_losses_are_those_of_torch(config):
    reconstruction = problem(config().workload, 0, CPU)
    x = reconstruction.test.x
    pixels = F.binary_cross_entropy_with_logits(reconstruction.model(x), x, reduction="none")
    assert reconstruction.judge()["loss/test"] == pytest.approx(pixels.sum(1).mean().item())
    classification = problem(config("workload=classifier").workload, 0, CPU)
    test = classification.test
    logits = classification.model(test.x)
    judged = classification.judge()
    assert judged["loss/test"] == pytest.approx(F.cross_entropy(logits, test.y).item())
    hits = (logits.argmax(1) == test.y).float().mean().item()
    assert judged["accuracy/test(%)"] == pytest.approx(100 * hits)


def test_losses_are_means_over_all_chunks(config, monkeypatch):
    now = problem(config("workload=classifier").workload, 0, CPU)
    whole = now.judge()
    monkeypatch.setattr(workload, "CHUNK", 5)
    assert now.judge() == pytest.approx(whole)


def test_batches_are_orders_of_all_examples():
    examples = Examples(torch.arange(10.0)[:, None], torch.arange(10))
    stream = batches(examples, 4, seed=0)
    seen = torch.cat([next(stream).y for _ in range(5)])
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()


def test_a_batch_of_more_examples_than_there_are_is_refused():
    examples = Examples(torch.ones(3, 1), torch.ones(3))
    with pytest.raises(ValueError, match=r"batch_size must be at most 3, .* got 4\."):
        next(batches(examples, 4, seed=0))


def test_the_autoencoder_has_a_linear_code_and_its_mirror():
    sizes = [layer.weight.shape for layer in Autoencoder([8, 5, 2]) if isinstance(layer, nn.Linear)]
    assert sizes == [(5, 8), (2, 5), (5, 2), (8, 5)]
    assert [type(layer).__name__ for layer in Autoencoder([8, 5, 2])] == [
        "Linear", "Sigmoid", "Linear", "Linear", "Sigmoid", "Linear",
    ]  # fmt: skip


def test_units_begin_with_few_inputs():
    torch.manual_seed(0)
    weight = sparse_linear(100, 400).weight
    assert ((weight != 0).sum(1) == INPUTS_OF_A_UNIT).all()
    assert weight[weight != 0].std().item() == pytest.approx(1, abs=0.05)
    assert (sparse_linear(4, 3).weight != 0).all()


# Settings


def test_tuned_settings_win_over_the_files_own_and_the_command_line_over_both():
    register_optimizers()

    def resolved(*overrides):
        changes = ["optimizer=adam", "++tuned={autoencoder:{lr:0.5,eps:0.25,batch_size:7}}", *overrides]
        with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
            found = typed(compose("optimizers", changes), overrides)
        return found.optimizer.lr, found.optimizer.eps, found.batch_size  # type: ignore[attr-defined]

    assert resolved() == (0.5, 0.25, 7)
    assert resolved("optimizer.lr=0.125", "batch_size=3") == (0.125, 0.25, 3)
    assert resolved("++optimizer.lr=0.125", "optimizer.eps=1.0") == (0.125, 1.0, 7)
    assert resolved("workload=conv4", "++tuned={conv4:{lr:0.75}}") == (0.75, 1e-8, None)


def test_what_is_tuned_is_checked_as_other_settings_are():
    register_optimizers()
    changes = ["optimizer=adam", "++tuned={autoencoder:{learning_rate:0.5}}"]
    with (
        initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"),
        pytest.raises(Exception, match="Key 'learning_rate' not in 'Adam'"),
    ):
        typed(compose("optimizers", changes))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(slow("autoencoder", name) for name in NAMES if name != "adam"),
        ("autoencoder", "adam"),
        ("classifier", "muon"),
        ("conv4", "kfac"),
        slow("transformer", "kfac"),
        slow("logistic", "newton_cg"),
        slow("pinn", "lbfgs"),
    ],
)
@pytest.mark.filterwarnings("ignore:KFAC")
def test_the_files_compose_and_are_built(config, kind, name):
    settings = config(f"workload={kind}", f"optimizer={name}", base=())
    assert json.dumps(settings.tuned)
    model = build(settings.workload.model)
    Stepper(settings.optimizer, Problem(model, False, *[Examples(torch.ones(1), torch.ones(1))] * 3))


@pytest.mark.parametrize("name", FILES)
def test_files_of_optimizers_hold_what_differs_from_the_defaults(name):
    own = OmegaConf.load(REPOSITORY / "conf" / "optimizer" / f"{name}.yaml")
    assert own.pop("defaults") == [f"/schema/optimizer/{name}", "_self_"]
    defaults = OmegaConf.structured(OPTIMIZERS[name])
    resolved = OmegaConf.merge(defaults, own)
    assert own
    assert not [key for key in own if resolved[key] == defaults[key]]


def test_every_optimizer_of_the_library_is_an_option_with_the_defaults_of_its_class():
    built = {schema._target_ for schema in OPTIMIZERS.values()}
    assert {
        f"metagrad.optim.{name}" for name in mg.optim.__all__ if hasattr(getattr(mg.optim, name), "step")
    } <= built
    assert {"adahessian", "kfac", "newton_cg", "sophia_g", "sparse_adam"} <= set(NAMES)
    for schema in OPTIMIZERS.values():
        arguments = inspect.signature(get_object(schema._target_)).parameters
        for key, value in OmegaConf.to_container(OmegaConf.structured(schema)).items():
            if key in arguments:
                default = arguments[key].default
                assert value == (list(default) if isinstance(default, tuple) else default)


def test_there_is_a_schema_for_every_file():
    tuned = {path.stem for path in (REPOSITORY / "conf" / "tuned").glob("*.yaml")}
    assert {*FILES, *tuned} <= set(NAMES)


BAD_SETTINGS = {
    "+optimizer.foo=1": r"optimizers: there is no key optimizer\.foo; the keys there are ",
    "workload.data.held_out=20": r"workload\.data\.held_out must be below 20, the drawings of a character, got 20\.",
    "budget=0": r"optimizers: budget must be above 0 gradient-equivalents, got 0\.",
    "evaluations=0": r"optimizers: evaluations must be at least 1, got 0",
    "batch_size=0": r"optimizers: batch_size must be at least 1, got 0",
}


@pytest.mark.parametrize("override", BAD_SETTINGS)
def test_bad_settings_are_refused(config, override):
    with pytest.raises(ValueError, match=BAD_SETTINGS[override]):
        config(override, base=())


def test_muon_is_refused_by_name_where_there_are_no_matrices(config, trained, tmp_path):
    with pytest.raises(ValueError, match=r"muon moves matrices of hidden layers, and Conv4 has none\."):
        trained(tmp_path, "workload=conv4", "optimizer=muon")


def test_muon_moves_hidden_matrices_and_another_optimizer_the_rest():
    model = mg.models.MLP([4, 3, 2])
    matrices, rest = split_for_muon(model)
    assert [p.shape for p in matrices] == [(3, 4)]
    assert [p.shape for p in rest] == [(3,), (2, 3), (2,)]


def test_an_optimizers_refusal_is_told_in_its_words(config):
    with pytest.raises(ValueError, match=r"build: metagrad\.optim\.SOAP: .*lr"):
        build_optimizer(
            config("optimizer=soap", "optimizer.lr=-1").optimizer, [torch.ones(2, requires_grad=True)]
        )


# The outer loop of experiments.train, which has the same optimizers


BY_CLOSURE = [
    name
    for name, schema in OPTIMIZERS.items()
    if name != "kfac" and outer.asks_for_closure(get_object(schema._target_))
]


def outer_run(composed, *overrides):
    torch.manual_seed(0)
    settings = composed("device=cpu", "meta_batch=2", "model.sizes=[1,5,1]", *overrides)
    splits = type("Splits", (), {"train": mg.tasks.Sinusoid(shots=4, queries=3)})()
    return Run(settings, build_parts(settings), splits, CPU, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", fast(("sophia_h", "newton_cg", "lbfgs"), ["adahessian", "sophia_h", "soap", *BY_CLOSURE])
)
def test_the_outer_loop_takes_steps_by_curvature(composed, name):
    run = outer_run(composed, f"optimizer={name}")
    before = [p.detach().clone() for p in run.parts.module.parameters()]
    for _ in range(3):
        outer_step(run, None)
    assert all(not torch.equal(a, b) for a, b in zip(before, run.parts.module.parameters(), strict=True))


def test_a_closure_of_an_optimizer_of_torchs_is_called(composed):
    run = outer_run(composed, "optimizer=custom", "optimizer._target_=torch.optim.LBFGS", "optimizer.lr=1e-3")
    before = next(run.parts.module.parameters()).detach().clone()
    outer_step(run, None)
    assert run.parts.takes_closure
    assert not torch.equal(before, next(run.parts.module.parameters()))


def test_the_loss_of_all_predictions_has_the_gradient_of_the_outer_loss(composed):
    parts = outer_run(composed).parts
    maml, batch = parts.module.double(), mg.tasks.Sinusoid(shots=4, queries=3, dtype=torch.float64).sample(3)
    out = maml(batch)
    whole = outer.known_loss(parts, batch, out)
    params = list(maml.parameters())
    expected = torch.autograd.grad(out.loss, params, retain_graph=True)
    assert whole is not out.loss
    for g, e in zip(torch.autograd.grad(whole, params), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-10, atol=1e-12)


def test_a_loss_that_sums_over_examples_stays_what_it_is(composed):
    parts = outer_run(composed).parts._replace(loss_fn=functools.partial(F.mse_loss, reduction="sum"))
    batch = mg.tasks.Sinusoid(shots=4, queries=3).sample(3)
    out = parts.algorithm(batch)
    assert outer.known_loss(parts, batch, out) is out.loss


def test_a_trial_step_that_goes_too_far_is_rejected_and_does_not_end_the_run(composed):
    run = outer_run(composed)
    batch = run.splits.train.sample(2)
    losses_seen = []

    class Tries(torch.optim.SGD):
        def step(self, closure):  # type: ignore[override]
            losses_seen.append(closure().item())
            for p in self.param_groups[0]["params"]:
                p.data.mul_(1e30)
            losses_seen.append(closure().item())

    params = list(run.parts.module.parameters())
    outer.step(
        run.parts._replace(optimizer=Tries(params), takes_closure=True), batch, lambda _: nullcontext()
    )
    assert math.isfinite(losses_seen[0])
    assert losses_seen[1] == math.inf


@pytest.mark.parametrize(("name", "reason"), [("kfac", "calls of the layers"), ("muon", "matrices alone")])
def test_the_outer_loop_refuses_what_does_not_fit(composed, name, reason):
    with pytest.raises(
        ValueError, match=f"is no optimizer of the outer loop: .*{reason}.* Take optimizer=adam"
    ):
        build_parts(composed(f"optimizer={name}"))


def test_what_was_tuned_for_others_is_no_part_of_the_configuration_of_train(composed):
    assert not {"tuned", "batch_size"} & set(vars(composed("optimizer=soap").optimizer))


# Comparisons


@pytest.fixture(scope="module")
def swept(trained, tmp_path_factory):
    """Return the folder of a sweep: two optimizers, one of them twice, a divergence, and two workloads."""
    folder = tmp_path_factory.mktemp("swept")
    jobs = [
        ("optimizer=sgd", "optimizer.lr=1e-3"),
        ("optimizer=adam", "optimizer.lr=1e-2"),
        ("optimizer=sgd", "optimizer.lr=1e30", "workload=classifier"),
        ("optimizer=adam", "optimizer.lr=1e-2", "workload=classifier"),
    ]
    for i, overrides in enumerate(jobs):
        trained(folder / str(i), *overrides)
    return folder


@pytest.fixture
def copied(swept, tmp_path):
    """Return a copy of the sweep, to be damaged."""
    return shutil.copytree(swept, tmp_path / "sweep")


def test_the_table_is_sorted_by_the_training_loss(swept):
    runs = [run for run in finished(find_jobs(swept)) if run.workload == "autoencoder"]
    header, _, *rows = table(runs).splitlines()
    assert (
        header == "| optimizer | training loss | test loss | steps | gradients | seconds | gradients a step |"
    )
    shown = [float(row.split(" | ")[1]) for row in rows]
    assert shown == sorted(shown)
    curve = read_curve(swept / "0")
    train, test = curve["loss/train"][-1], curve["loss/test"][-1]
    assert f"| sgd lr=1e-3 | {train:.4g} | {test:.4g} | 6 | 6 |" in "\n".join(rows)


def test_what_diverged_comes_last_and_is_marked(swept):
    runs = [run for run in finished(find_jobs(swept)) if run.workload == "classifier"]
    first, last = table(runs).splitlines()[2:]
    assert first.startswith("| adam lr=1e-2 | ")
    assert last.startswith("| sgd lr=1e30 | diverged at step ")


def test_there_is_a_table_for_each_workload_and_a_list_of_what_failed(copied):
    (copied / "1" / "failure.txt").write_text("optimizers: no\n")
    (copied / "1" / "result.json").unlink()
    jobs = find_jobs(copied)
    text = report(finished(jobs), jobs)
    assert text.index("**autoencoder**") < text.index("- 1 (adam lr=1e-2): failed: optimizers: no")
    assert "test accuracy (%)" in text.partition("**classifier**")[2].splitlines()[2]


def test_a_run_of_one_setting_is_named_by_its_optimizer(swept):
    job = find_jobs(swept / "1")[0]
    assert label_of(job, []) == "adam"


@pytest.mark.slow
def test_the_picture_has_something_on_it(swept, tmp_path):
    from matplotlib.image import imread

    picture = imread(losses(tmp_path / "x.png", by_workload(finished(find_jobs(swept)))))
    assert min(picture.shape[:2]) > 400
    assert 0.01 < (picture[..., :3].min(-1) < 0.95).mean() < 0.9


def test_labels_are_moved_apart_and_keep_their_order():
    placed = spread({"a": 0.5, "b": 0.52, "c": 0.99, "d": 1.4}, gap=0.1)
    heights = [placed[name] for name in "abcd"]
    assert heights == sorted(heights)
    assert all(above - below >= 0.1 - 1e-9 for below, above in pairwise(heights))
    assert heights[-1] <= 1
    assert spread({"a": 0.2, "b": 0.8}, gap=0.1) == {"a": 0.2, "b": 0.8}


def test_a_sweep_over_all_files_has_the_jobs_that_never_started(copied):
    (copied / "multirun.yaml").write_text("hydra: {overrides: {task: ['optimizer=glob(soph*)']}}\n")
    for i in range(2):
        shutil.rmtree(copied / str(i))
    jobs = find_jobs(copied)
    missing = [label_of(job, []) for job in jobs if job.status.startswith("missing")]
    assert missing == ["sophia_g", "sophia_h"]


# The programs


@pytest.mark.slow
def test_missing_data_is_one_clear_line_and_a_failure(program, tmp_path):
    arguments = ["logger=none", f"workload.data.root={tmp_path}", "hydra.run.dir=run"]
    code, _, err = program("studies.optimizers", *arguments, cwd=tmp_path)
    assert code != 0
    assert any(line.startswith("Omniglot: ") for line in err.splitlines())
    assert "Traceback" not in err
    assert (tmp_path / "run" / "failure.txt").read_text().startswith("Omniglot: ")


@pytest.mark.slow
def test_compare_refuses_other_folders(program, tmp_path):
    code, _, err = program("studies.optimizers.compare", ".", cwd=tmp_path)
    assert code != 0
    assert err.startswith("compare: . is neither a sweep nor a run folder")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[]\n")
    (tmp_path / "result.json").write_text('{"metrics": {}}')
    code, _, err = program("studies.optimizers.compare", ".", cwd=tmp_path)
    assert code != 0
    assert "is no run of experiments.studies.optimizers: it has no settings.json." in err
