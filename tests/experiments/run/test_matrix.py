"""Every option of `conf/` trains for 20 iterations, in pairs of options, or raises one sentence that names a key."""

from __future__ import annotations

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
REFUSED = {
    ("imaml", "inner=adamw"): r"algorithm\.inner: weight_decay moves the steps to another minimum",
    ("imaml", "inner=soap"): r"algorithm\.inner: weight_decay moves the steps to another minimum",
    **{
        (
            algorithm,
            f"optimizer={name}",
        ): "needs second derivatives of the meta-objective, and the meta-gradient of"
        for algorithm in ("imaml", "reptile")
        for name in ("adahessian", "gauss_newton", "newton_cg", "sophia_g", "sophia_h")
    },
    ("maml_plus_plus", "optimizer=gauss_newton"): "GaussNewton: the loss contains none whose curvature",
    ("maml_plus_plus", "optimizer=sophia_g"): "SophiaG: the loss contains none whose curvature",
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


MISFITS = {
    "model=conv4": r"train: model\.ways takes its value from another key that is not there",
    "algorithm=protonet": "train: ProtoNet classifies, but the targets of the task are real numbers",
    "algorithm=cavia": r"algorithm\.adapt: .* Take model=context_mlp for curves",
    "algorithm=maml_plus_plus": r"algorithm\.norm: .* or algorithm\.norm=null for models without batch norm",
}


@pytest.mark.parametrize("option", MISFITS)
def test_options_that_do_not_fit_are_one_sentence_that_names_keys(run, tmp_path, option):
    with pytest.raises(ValueError, match=MISFITS[option]) as caught:
        run(tmp_path, option)
    assert "\n" not in str(caught.value)
