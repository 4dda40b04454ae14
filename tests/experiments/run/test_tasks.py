"""Every kind of task, trained for a few steps as `experiments.train` does."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from experiments.run.build import build_splits, generator
from tests.marks import slow

SHORT = (
    "iterations=1",
    "meta_batch=1",
    "algorithm.steps=1",
    "evaluate.steps=1",
    "evaluate.tasks=2",
    "evaluate.validation_tasks=2",
)
SMALL = ("model.hidden=4", "model.norm=group", "model.pool=stride", "task.queries=2", *SHORT)
CSV = "boy,age,height\n" + "".join(
    f"{boy},{age},{100 + boy + 6 * age}\n" for boy in range(20) for age in range(9)
)


def numbers(items: int) -> TensorDataset:
    """A data set of images, with twenty classes of unequal size."""
    labels = torch.cat([torch.arange(20), torch.arange(20).repeat(items // 20)])
    return TensorDataset(torch.rand(len(labels), 1, 16, 16), labels)


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("task", ["lines", "gaussian_process"])
def test_families_of_curves(run, tmp_path, task):
    folder = run(tmp_path / "run", f"task={task}", "task.shots=3", "task.noise=0.1", "model.sizes=[1,4,1]")
    result = result_of(folder)
    assert result["metrics"]["test/query_loss"]["mean"] > 0
    assert "shots=3, queries=10, noise=0.1" in result["protocol"]["tasks"]


def test_tables(run, tmp_path):
    (tmp_path / "boys.csv").write_text(CSV)
    keys = [
        f"task.table={tmp_path}/boys.csv",
        "task.task_column=boy",
        "task.x={input: [age]}",
        "task.y=height",
    ]
    folder = run(tmp_path / "run", "task=tabular", *keys, "model.sizes=[1,4,1]")
    assert result_of(folder)["protocol"]["tasks"] == (
        "Tabular tasks by 'boy', 4 support and 4 query rows, 4 tasks of the test split"
    )


@pytest.mark.parametrize(
    "imbalance",
    [
        slow((), id="balanced"),
        pytest.param(("task.ways=[2,3]", "task.shots=[1,2]", "model.ways=3"), id="padded"),
    ],
)
def test_a_data_set_of_the_users(run, tmp_path, monkeypatch, imbalance):
    monkeypatch.setitem(sys.modules, "mypackage", SimpleNamespace(numbers=numbers))
    keys = ["task.dataset._target_=mypackage.numbers", "task.dataset.args={items:100}", "allow=[mypackage.]"]
    keys += ["task.ways=3", "model=conv4", "model.image_size=16", *SMALL, *imbalance]
    result = result_of(run(tmp_path / "run", "task=fewshot", *keys))
    assert 0 <= result["metrics"]["test/accuracy(%)"]["mean"] <= 100
    ways = "2 to 3-way 1 to 2-shot" if imbalance else "3-way 1-shot"
    assert (
        f"FewShot {ways}, 2 queries per class, test split: 4 classes of TensorDataset"
        == result["protocol"]["tasks"]
    )


@pytest.fixture
def images(tmp_path):
    """A folder of twenty classes of three images."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    for name in range(20):
        for k in range(3):
            path = tmp_path / "images" / f"c{name}" / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(np.full((8, 8), 10 * name + k, dtype=np.uint8)).save(path)
    return [f"task.dataset.root={tmp_path}/images", "task.dataset.mode=L", "task.ways=2", "task.queries=2"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_workers_change_nothing(composed, images):
    batches = [
        build_splits(
            composed("task=folder", *images, "task.dataset.size=8", f"task.workers={n}")
        ).train.sample(2, generator=generator(0, "train"))
        for n in (0, 1)
    ]
    assert torch.equal(batches[0].query.x, batches[1].query.x)


def test_splits_of_a_run_have_no_class_in_common(composed, tmp_path):
    (tmp_path / "boys.csv").write_text(CSV)
    keys = [f"task.table={tmp_path}/boys.csv", "task.task_column=boy", "task.x=[age]", "task.y=height"]
    splits = build_splits(composed("task=tabular", *keys))
    tasks = [set(split.tasks) for split in splits]
    assert [len(part) for part in tasks] == [13, 3, 4]
    assert len(set.union(*tasks)) == 20
