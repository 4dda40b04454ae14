"""The example programs at a small size. Each program compares its derivatives with dense derivatives."""

import importlib
import os
import re
from pathlib import Path

import pytest
import torch

from experiments.examples.common import compare

DATA = Path(os.environ.get("METAGRAD_DATA", ""))


def needs(name):
    return pytest.mark.skipif(not (DATA / name).is_file(), reason=f"$METAGRAD_DATA/{name} is missing")


GNN = ["--epochs=40", "--hidden=8", "--check-steps=1", "--check-nodes=700", "--steps=5", "--outer-steps=1"]
RECOMMENDER = ["--iterations=2", "--students=8", "--shots=2", "--steps=2"]
ATTENTION = ["--lengths", "64", "128", "--dense-up-to=64", "--band=4", "--width=4", "--heads=2"]
CASES = [
    pytest.param("gnn_cora", GNN, "test accuracy", marks=needs("planetoid/cora.npz")),
    pytest.param(
        "recommender", RECOMMENDER, "MAML, 2 steps on 2 ratings", marks=needs("insteval/InstEval.csv")
    ),
    pytest.param("sparse_attention", ATTENTION, "128", id="sparse_attention"),
    pytest.param("sparse_convolution", ["--examples=2", "--channels=2", "--curves"], "Peak", id="curves"),
    pytest.param(
        "sparse_convolution",
        ["--examples=2", "--channels=2"],
        "Peak",
        marks=needs("omniglot/omniglot_105_bits.npz"),
        id="drawings",
    ),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), CASES)
def test_derivatives_agree_with_dense(name, arguments, expected, capsys):
    importlib.import_module(f"experiments.examples.{name}").main(arguments)
    out = capsys.readouterr().out
    differences = [float(found) for found in re.findall(r"relative difference (\S+)", out)]
    assert differences
    assert max(differences) < 1e-9
    assert expected in out


def test_a_missing_file_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("METAGRAD_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"omniglot_105_bits.npz is missing.*set METAGRAD_DATA"):
        importlib.import_module("experiments.examples.sparse_convolution").main([])


@pytest.mark.parametrize(("value", "difference"), [(1.0, r"5\.0e-01"), (float("nan"), "nan")])
def test_a_difference_stops_the_program(value, difference):
    expected = f"gradient: the relative difference must be at most 1e-09, got {difference}"
    with pytest.raises(SystemExit, match=expected):
        compare("gradient", torch.tensor([value]), torch.tensor([2.0]), tolerance=1e-9)
