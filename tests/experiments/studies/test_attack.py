"""Attacks on a graph: the meta-gradient against a dense matrix, flips that raise the loss, runs that go on."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir

from experiments.run.help import CONF
from experiments.studies.attack import run
from experiments.studies.attack.__main__ import study
from experiments.studies.attack.metattack import Metattack, Surrogate, dense_normalized, is_last, pairs_of
from experiments.studies.attack.victim import GCN, LearnedEdges, similar
from experiments.studies.citations import Citations, largest_component, normalized, ordered
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
    surrogate = Surrogate(**{"steps": 6, "lr": 0.2, "momentum": 0.9, "memory": "sqrt", **options})
    return Metattack(graph, surrogate, block=60, seed=0)


@pytest.mark.parametrize("memory", ["full", "sqrt"])
def test_the_meta_gradient_is_that_of_a_textbook_loop_on_a_dense_matrix(graph, memory):
    graph = graph._replace(words=graph.words.double())
    attack = attack_on(graph._replace(words=graph.words.float()), memory=memory)
    pairs, weights = attack.candidates()
    start = {"weight": torch.randn(12, CLASSES, dtype=torch.float64).mul(0.3).requires_grad_()}
    found = attack.surrogate.meta_gradient(
        graph, start, attack.target, lambda w: normalized(pairs, w, NODES), weights.double()
    )
    values = weights.double().requires_grad_()
    matrix = dense_normalized(pairs, values, NODES)
    power, weight, velocity = matrix @ matrix @ graph.words.to_dense(), start["weight"], 0.0
    for _ in range(6):
        loss = F.cross_entropy((power @ weight)[graph.train], graph.labels[graph.train])
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        velocity = 0.9 * velocity + gradient
        weight = weight - 0.2 * velocity
    nodes = graph.unlabelled
    outer = F.cross_entropy((power @ weight)[nodes], attack.target[nodes])
    torch.testing.assert_close(found, torch.autograd.grad(outer, values)[0], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_flip_raises_the_loss_by_what_the_gradient_says(graph):
    """An edge is flipped that is among the best ones if every candidate is tried."""
    attack = attack_on(graph)
    pairs, weights = attack.candidates()
    start = attack.surrogate.start(graph, torch.Generator().manual_seed(1))

    def loss(weights):
        matrix = normalized(pairs, weights, NODES)
        trained = attack.surrogate.trained(start, matrix, graph.words, graph)
        logits = attack.surrogate.logits(trained, matrix, matrix, graph.words)[graph.unlabelled]
        return F.cross_entropy(logits, attack.target[graph.unlabelled]).item()

    gradient = attack.surrogate.meta_gradient(
        graph, start, attack.target, lambda w: normalized(pairs, w, NODES), weights
    )
    tried = torch.tensor(
        [loss(weights.index_put((torch.tensor(i),), 1 - weights[i])) for i in range(len(pairs))]
    )
    best = (gradient * (1 - 2 * weights)).argmax()
    assert tried[best] > loss(weights)
    assert (tried > tried[best]).double().mean() < 0.1


def test_no_paper_loses_its_last_edge(graph):
    pairs = torch.tensor([[0, 1], [1, 2], [2, 3], [1, 3]])
    assert is_last(pairs, 5).tolist() == [True, False, False, False]
    attack = attack_on(graph)
    for _ in range(8):
        attack.flip()
    assert torch.equal(
        attack.pairs.flatten().bincount(minlength=NODES) > 0,
        graph.pairs.flatten().bincount(minlength=NODES) > 0,
    )


def test_an_attack_that_goes_on_flips_what_it_would_have_flipped(graph):
    whole, first, second = (attack_on(graph) for _ in range(3))
    expected = [whole.flip().tolist() for _ in range(2)]
    flipped = [first.flip().tolist()]
    second.load_state_dict(first.state_dict())
    assert [*flipped, second.flip().tolist()] == expected
    changed = {tuple(pair) for pair in graph.pairs.tolist()} ^ {tuple(pair) for pair in whole.pairs.tolist()}
    assert changed == {tuple(pair) for pair in expected}


def test_the_largest_component_keeps_its_papers_in_order(graph):
    lonely = Citations(
        torch.cat([graph.pairs + 2, torch.tensor([[0, 1]])]),
        SparseTensor.from_dense(torch.cat([torch.ones(2, 12), graph.words.to_dense()])),
        torch.cat([torch.zeros(2, dtype=torch.int64), graph.labels]),
        *torch.arange(3)[:, None],
    )
    found = largest_component(lonely, torch.Generator().manual_seed(0))
    assert torch.equal(found.pairs, graph.pairs)
    assert torch.equal(found.labels, graph.labels)
    torch.testing.assert_close(found.words.to_dense(), graph.words.to_dense())
    assert sorted(torch.cat(found[3:]).tolist()) == list(range(NODES))


def test_learned_weights_fall_where_subjects_differ(graph):
    network = GCN(hidden=8, epochs=5, lr=0.05, dropout=0.0, weight_decay=0.0)
    weights = LearnedEdges(steps=4, lr=1.0, inner_steps=4, inner_lr=0.1).weights(
        network, graph, graph.pairs, seed=0
    )
    same = graph.labels[graph.pairs[:, 0]] == graph.labels[graph.pairs[:, 1]]
    assert weights[same].mean() > weights[~same].mean() + 0.05


def test_similar_papers_share_words(graph):
    kept = {tuple(pair) for pair in similar(graph, graph.pairs, 0.4).tolist()}
    words = [set(row.nonzero()[:, 0].tolist()) for row in graph.words.to_dense()]
    for left, right in graph.pairs.tolist():
        index = len(words[left] & words[right]) / len(words[left] | words[right])
        assert ((left, right) in kept) == (index >= 0.4)


@pytest.fixture
def config():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides: study.typed(compose("attack", ["logger=none", *overrides]))


SMALL = (
    "victims=2",
    "points=2",
    "block=60",
    "fraction=0.05",
    "surrogate.steps=4",
    "save_every=1",
    "threads=1",
)
SHORT = ("gcn.epochs=10", "defence.steps=2", "defence.inner_steps=3", "seeds=[0]")


@pytest.mark.slow
def test_the_program_writes_tables_and_goes_on(graph, config, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load", lambda: graph)
    monkeypatch.setattr(run, "largest_component", lambda graph, generator: graph)
    flipped = []
    original = Metattack.flip

    def flip(attack):
        if len(flipped) == 2:
            flipped.append(None)
            raise KeyboardInterrupt
        flipped.append(original(attack))
        return flipped[-1]

    monkeypatch.setattr(Metattack, "flip", flip)
    with pytest.raises(KeyboardInterrupt):
        study.run(config(*SMALL, *SHORT), tmp_path)
    study.run(config(*SMALL, *SHORT), tmp_path)
    result = json.loads((tmp_path / "cora" / "0" / "result.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "cora" / "0" / "flips.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, result["flips"] + 1))
    assert len([one for one in flipped if one is not None]) == result["flips"]
    assert result["memory"]["sparse"] > 0
    assert {len(found["accuracies"]) for found in result["graphs"].values()} == {2}
    text = (tmp_path / "attack.md").read_text()
    assert "| Metattack, edge weights learned on validation nodes |" in text
    assert (tmp_path / "attack.png").stat().st_size > 0
    with pytest.raises(
        ValueError, match=r"attack: .* holds a run with other settings, .*; choose another folder="
    ):
        study.run(config(*SMALL, *SHORT, "victims=3"), tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seeds=[]", r"attack: seeds is empty; give at least one"),
        ("fraction=1.5", r"attack: fraction must be between 0 and 1, got 1.5"),
        ("block=1", r"attack: block must be at least 2, got 1"),
    ],
)
def test_wrong_settings_are_errors(config, override, message):
    with pytest.raises(ValueError, match=message):
        config(override)


def test_pairs_are_numbered_both_ways():
    pairs = torch.tensor([[0, 3], [2, 4]])
    assert torch.equal(pairs_of(torch.tensor([3, 14]), 5), pairs)
