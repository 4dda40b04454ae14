"""A whole run on the real data, where it is."""

import json
import os
from pathlib import Path

import pytest

from experiments.run.metrics import read_rows

FILE = Path(os.environ.get("METAGRAD_DATA", "")) / "omniglot" / "omniglot_105_bits.npz"

pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="$METAGRAD_DATA/omniglot/omniglot_105_bits.npz is missing"
)


@pytest.fixture(scope="module")
def omniglot_run(run, tmp_path_factory):
    settings = ["iterations=1", "model.hidden=4", "task.queries=3", "plots.steps=1", "evaluate.every=1"]
    settings += ["evaluate.tasks=2", "evaluate.validation_tasks=2"]
    return run(tmp_path_factory.mktemp("omniglot"), "experiment=omniglot_5way1shot", *settings, plots=True)


def test_accuracy_is_measured_in_percent(omniglot_run):
    row = read_rows(omniglot_run / "metrics.jsonl")[-1]
    assert 0 <= row["train/accuracy(%)"] <= 100
    assert {"validation/accuracy(%)", "validation/accuracy_ci95(%)", "validation/accuracy_before(%)"} <= set(
        row
    )


def test_the_protocol_says_what_makes_the_number_comparable(omniglot_run):
    protocol = json.loads((omniglot_run / "result.json").read_text())["protocol"]
    assert "5-way 1-shot, 15 queries per class, test split of Vinyals" in protocol["tasks"]
    assert "28x28 by area" in protocol["tasks"]
    assert protocol["batch_norm"] == "batch statistics, transductive"
    assert (protocol["inner_steps_train"], protocol["inner_steps_test"]) == (1, 3)


@pytest.mark.parametrize("name", ["learning_curve", "adaptation"])
def test_classification_has_its_plots(omniglot_run, name):
    assert (omniglot_run / "plots" / f"{name}.png").stat().st_size > 0
