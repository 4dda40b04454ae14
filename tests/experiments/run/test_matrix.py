"""Every option of `conf/` trains for 20 iterations, in pairs of options, or raises one sentence that names a key."""

import itertools
import json
import math

import pytest

from experiments.run.config import SCHEMAS
from experiments.run.help import CONF
from experiments.run.job import explained
from tests.experiments.run.test_algorithms import TINY
from tests.marks import fast

SHORT = ("iterations=20", "log.every=20", "evaluate.every=20", "algorithm.steps=2", "memory.enabled=false")
CURVES = ("model.sizes=[1,8,1]",)
OWN = {
    "cavia": ("model=context_mlp", "model.sizes=[1,8,1]"),
    "maml_plus_plus": ("algorithm.norm=null", *CURVES),
    **dict.fromkeys(("proto_maml", "protonet", "r2d2"), TINY[:-3]),
}
"""The task and the model of an algorithm, if it cannot use the defaults."""
WITHOUT_RULE = ("meta_sgd", "maml_plus_plus", "protonet", "r2d2")
MOVES = r"algorithm\.inner: weight_decay moves the steps to another minimum"
ONE_LOSS = "needs one loss .* Choose another algorithm=, or optimizer="
SECOND = "needs second derivatives of the meta-objective, and the meta-gradient of"
REFUSED = {
    ("imaml", "inner=adamw"): MOVES,
    ("imaml", "inner=soap"): MOVES,
    **{
        (algorithm, f"optimizer={name}"): SECOND
        for algorithm in ("imaml", "reptile")
        for name in ("adahessian", "gauss_newton", "newton_cg", "sophia_g", "sophia_h")
    },
    ("maml_plus_plus", "optimizer=gauss_newton"): f"GaussNewton {ONE_LOSS}",
    ("maml_plus_plus", "optimizer=sophia_g"): f"SophiaG {ONE_LOSS}",
    ("proto_maml", "inner=muon"): "must be a matrix",
    ("cavia", "inner=muon"): r"'\*\.weight' is the name of no parameter",
}


def options(group):
    files = {file.stem for file in (CONF / group).glob("*.yaml")}
    return sorted({*files, *SCHEMAS.get(group, {})} - {"custom", "cavia", "logger"})


ALGORITHMS = sorted({*options("algorithm"), "cavia"})
RULES = [name for name in options("algorithm/inner") if not name.startswith("omniglot")]
PAIRS = [
    (algorithm, f"inner={rule}")
    for algorithm in ALGORITHMS
    if algorithm not in WITHOUT_RULE
    for rule in RULES
]
PAIRS += [(algorithm, f"optimizer={name}") for algorithm in ALGORITHMS for name in options("optimizer")]
PAIRS += [("imaml", f"hypergradient={name}") for name in options("algorithm/hypergradient")]
PAIRS += [
    ("maml", f"task={name}")
    for name in ("gaussian_process", "harmonic", "lines", "sinusoid_or_line", "step_functions")
]
PAIRS += [("maml", f"{group}={name}") for group in ("schedule", "logger") for name in options(group)]
FAST = [
    ("maml", "inner=adam"),
    ("maml", "inner=muon"),
    ("anil", "optimizer=adam"),
    ("imaml", "inner=adamw"),
    ("maml", "optimizer=lbfgs"),
]
FAST += [("reptile", "optimizer=sophia_g")]


@pytest.mark.parametrize("pair", fast(FAST, PAIRS), ids="-".join)
@pytest.mark.filterwarnings("ignore")
def test_pairs_of_options_train_or_raise_one_sentence(run, tmp_path, monkeypatch, pair):
    algorithm, option = pair
    monkeypatch.setenv("WANDB_MODE", "disabled")
    group = "algorithm/" if option.startswith(("inner=", "hypergradient=")) else ""
    settings = [f"algorithm={algorithm}", f"{group}{option}", *OWN.get(algorithm, CURVES), *SHORT]
    settings += ["optimizer.lr=1e-4"] * (option == "optimizer=sgd")  # learned rates diverge with larger ones
    if pair in REFUSED:
        with pytest.raises(Exception, match=REFUSED[pair]) as caught:
            run(tmp_path, *settings)
        assert "\n" not in (explained(caught.value) or "\n")
        return
    metrics = json.loads((run(tmp_path, *settings) / "result.json").read_text())["metrics"]
    assert all(math.isfinite(metric["mean"]) for metric in metrics.values())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a folder of images of 16 pixels, with four classes in each split."""
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    root = tmp_path_factory.mktemp("images")
    for split, number in itertools.product(("train", "val", "test"), range(4)):
        (root / split / f"{split}{number}").mkdir(parents=True)
        for i in range(4):
            color = (60 * number, 20 * i, 100)
            pillow.new("RGB", (16, 16), color).save(root / split / f"{split}{number}" / f"{i}.png")
    return root


IMAGES = ("task=folder", "task.dataset.size=16", "task.ways=2", "task.shots=1", "task.queries=2")
IMAGES += ("algorithm.steps=1", "iterations=2", "log.every=2", "evaluate.every=2", "memory.enabled=false")
NETWORKS = {
    "conv4": ("model.in_channels=3", "model.image_size=16", "model.hidden=4"),
    "resnet12": ("model.in_channels=3", "model.widths=[4,4,4,4]"),
    "transformer": ("model.input_shape=[3,16,16]", "model.patch=8", "model.width=4", "model.heads=2"),
}
OF_CURVES = r"algorithm\.adapt: .* Take model=context_mlp for curves"
NO_NORMS = r"algorithm\.norm: .* or algorithm\.norm=null for models without batch norm"
WITHOUT_NORMS = {("cavia", network): OF_CURVES for network in NETWORKS} | {
    ("maml_plus_plus", "transformer"): NO_NORMS
}


@pytest.mark.parametrize(
    "pair", fast([("maml", "conv4")], list(itertools.product(ALGORITHMS, NETWORKS))), ids="-".join
)
@pytest.mark.filterwarnings("ignore")
def test_every_network_trains_on_images_or_raises_one_sentence(run, images, tmp_path, pair):
    algorithm, network = pair
    settings = [f"algorithm={algorithm}", f"model={network}", *NETWORKS[network], *IMAGES]
    settings += [f"task.dataset.root={images}"]
    settings += ["model.norm=running"] * (algorithm == "maml_plus_plus" and network != "transformer")
    if pair in WITHOUT_NORMS:
        with pytest.raises(ValueError, match=WITHOUT_NORMS[pair]):
            run(tmp_path, *settings)
        return
    metrics = json.loads((run(tmp_path, *settings) / "result.json").read_text())["metrics"]
    assert all(math.isfinite(metric["mean"]) for metric in metrics.values())


MISFITS = {
    "model=conv4": r"train: model\.ways takes its value from another key that is not there",
    "algorithm=protonet": "train: ProtoNet classifies, but the targets of the task are real numbers",
    "algorithm=cavia": OF_CURVES,
    "algorithm=maml_plus_plus": NO_NORMS,
}


@pytest.mark.parametrize("option", MISFITS)
def test_options_that_do_not_fit_are_one_sentence_that_names_keys(run, tmp_path, option):
    with pytest.raises(ValueError, match=MISFITS[option]) as caught:
        run(tmp_path, option)
    assert "\n" not in str(caught.value)
