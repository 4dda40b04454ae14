"""Attacks on a graph: the meta-gradient against a dense matrix, flips that raise the loss, and resumed runs."""

import json

import pytest
import torch
import torch.nn.functional as F

from experiments.studies import attack as program
from experiments.studies.citations import Citations, normalized, ordered
from metagrad.sparse import SparseTensor

NODES, CLASSES = 36, 3


@pytest.fixture
def graph():
    """Return papers of three subjects, which share words and citations within a subject more often than across."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(NODES) % CLASSES
    same = labels[:, None] == labels
    cited = torch.rand(NODES, NODES, generator=generator) < torch.where(same, 0.3, 0.03)
    words = torch.rand(NODES, 12, generator=generator) < torch.where(
        torch.arange(12) % CLASSES == labels[:, None], 0.5, 0.1
    )
    words[:, 0] = True
    pairs = ordered(cited.triu(1).nonzero())
    return Citations(
        pairs, SparseTensor.from_dense(words.float()), labels, *torch.arange(NODES).split([12, 12, 12])
    )


def attack_on(graph, **options):
    surrogate = program.Surrogate(**{"steps": 6, "lr": 0.2, "momentum": 0.9, "memory": "sqrt", **options})
    return program.Metattack(graph, surrogate, block=60, seed=0)


@pytest.mark.parametrize("memory", ["full", "sqrt"])
def test_the_meta_gradient_is_that_of_a_naive_loop_on_a_dense_matrix(graph, memory):
    graph = graph._replace(words=graph.words.double())
    attack = attack_on(graph._replace(words=graph.words.float()), memory=memory)
    pairs, weights = attack.candidates()
    start = {"weight": torch.randn(12, CLASSES, dtype=torch.float64).mul(0.3).requires_grad_()}
    found = attack.surrogate.meta_gradient(
        graph, start, attack.target, lambda w: normalized(pairs, w, NODES), weights.double()
    )
    values = weights.double().requires_grad_()
    matrix = program.dense_normalized(pairs, values, NODES)
    power, weight, velocity = matrix @ matrix @ graph.words.to_dense(), start["weight"], 0.0
    for _ in range(6):
        loss = F.cross_entropy((power @ weight)[graph.train], graph.labels[graph.train])
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        velocity = 0.9 * velocity + gradient
        weight = weight - 0.2 * velocity
    nodes = graph.unlabelled
    outer = F.cross_entropy((power @ weight)[nodes], attack.target[nodes])
    torch.testing.assert_close(found, torch.autograd.grad(outer, values)[0], rtol=1e-9, atol=1e-12)


def test_no_paper_loses_its_last_edge(graph):
    pairs = torch.tensor([[0, 1], [1, 2], [2, 3], [1, 3]])
    assert program.is_last(pairs, 5).tolist() == [True, False, False, False]
    attack = attack_on(graph)
    for _ in range(8):
        attack.flip()
    had, has = (pairs.flatten().bincount(minlength=NODES) > 0 for pairs in (graph.pairs, attack.pairs))
    assert (has | ~had).all()  # a paper without edges may get one


def test_learned_weights_fall_where_subjects_differ(graph):
    weights = program.learned(graph, graph.pairs, seed=0, steps=4, inner_steps=4)
    same = graph.labels[graph.pairs[:, 0]] == graph.labels[graph.pairs[:, 1]]
    assert weights[same].mean() > weights[~same].mean() + 0.05


SMALL = ("victims=2", "points=2", "block=60", "fraction=0.05", "surrogate.steps=4", "epochs=10", "seeds=[0]")


@pytest.mark.slow
def test_the_program_writes_tables(graph, configured, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "load", lambda: graph)
    monkeypatch.setattr(program, "largest_component", lambda graph, generator: graph)
    program.study.run(configured(program.study, *SMALL, "defense_steps=2", "defense_inner=3"), tmp_path)
    result = json.loads((tmp_path / "cora" / "0" / "result.json").read_text())
    assert result["memory"]["sparse"] > 0
    assert {len(found["accuracies"]) for found in result["graphs"].values()} == {2}
    assert "| Metattack, edge weights learned on validation nodes |" in (tmp_path / "attack.md").read_text()
    assert (tmp_path / "attack.png").stat().st_size > 0
