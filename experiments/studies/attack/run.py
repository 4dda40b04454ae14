"""The attack of one seed: flips, the networks that are trained on what comes out, and what a meta-gradient takes."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.run.allocations import peak_bytes
from experiments.run.files import write_bytes
from experiments.run.metrics import JsonLines
from experiments.run.progress import Progress
from experiments.studies.attack.metattack import Metattack, Surrogate, dense_normalized, random_pairs
from experiments.studies.attack.victim import GCN, LearnedEdges, similar
from experiments.studies.citations import Citations, largest_component, load, normalized

if TYPE_CHECKING:
    from collections.abc import Callable

    from experiments.studies.attack.schema import AttackConfig
    from experiments.studies.study import Result, Work


def attack(config: AttackConfig, work: Work) -> Result:
    """Attack, train networks on what comes out, and return how well they do."""
    graph = largest_component(load(), torch.Generator().manual_seed(work.seed))
    attack = Metattack(graph, Surrogate(**asdict(config.surrogate)), block=config.block, seed=work.seed)
    flips = round(config.fraction * len(graph.pairs))
    marks = [round(flips * point / config.points) for point in range(1, config.points + 1)]
    poisoned, seconds = flip(attack, marks, config, work)
    return {
        "nodes": graph.nodes,
        "edges": len(graph.pairs),
        "flips": flips,
        "seconds_per_flip": seconds,
        "memory": memory(attack),
        "graphs": judge(graph, poisoned, config, work.seed),
    }


def flip(
    attack: Metattack, marks: list[int], config: AttackConfig, work: Work
) -> tuple[dict[int, Tensor], float]:
    """Flip edges, on from the last checkpoint; return the graph at each mark, and the mean seconds of a flip."""
    saved, poisoned, spent, first = work.folder / "last.pt", {}, 0.0, 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        attack.load_state_dict(state["attack"])
        poisoned, spent, first = state["poisoned"], state["spent"], state["flips"]
    with contextlib.closing(JsonLines(work.folder / "flips.jsonl", until=first)) as rows:
        for number in Progress(range(first + 1, marks[-1] + 1), unit="flip", leave=False):
            began = time.perf_counter()
            left, right = attack.flip().tolist()
            seconds = time.perf_counter() - began
            spent += seconds
            rows.write(number, {"left": left, "right": right, "seconds": seconds})
            work.log(number, {"flip/seconds": seconds})
            if number in marks:
                poisoned[number] = attack.pairs
            if number % config.save_every == 0 or number == marks[-1]:
                state = {"attack": attack.state_dict(), "poisoned": poisoned, "spent": spent, "flips": number}
                content = io.BytesIO()
                torch.save(state, content)
                write_bytes(saved, content.getvalue())
    return poisoned, spent / marks[-1]


def memory(attack: Metattack) -> dict[str, int]:
    """Return the peak bytes of a meta-gradient of some candidates, sparse, and dense in the better mode."""
    pairs, weights = attack.candidates()

    def peak(build: Callable[..., Any], mode: Any) -> int:
        surrogate = replace(attack.surrogate, memory=mode)
        return peak_bytes(lambda: attack.gradient(build, pairs, weights, surrogate))

    own = attack.surrogate.memory
    return {
        "sparse": peak(normalized, own),
        "dense": min(peak(dense_normalized, mode) for mode in {"full", own}),
    }


def judge(
    graph: Citations, poisoned: dict[int, Tensor], config: AttackConfig, seed: int
) -> dict[str, dict[str, Any]]:
    """Train networks on every graph; return by name how many edges were flipped, and the accuracy of each network."""
    network, defence = GCN(**asdict(config.gcn)), asdict(config.defence)
    least = defence.pop("jaccard")
    generator = torch.Generator().manual_seed(seed)
    graphs: dict[str, tuple[int, Tensor, Tensor | None]] = {"clean": (0, graph.pairs, None)}
    for number, pairs in poisoned.items():
        graphs[f"random {number}"] = (number, random_pairs(graph, number, generator), None)
        graphs[f"metattack {number}"] = (number, pairs, None)
    last, attacked = max(poisoned), poisoned[max(poisoned)]
    graphs["no edges"] = (0, graph.pairs[:0], None)
    for name, number, pairs in (("clean", 0, graph.pairs), ("metattack", last, attacked)):
        graphs[f"{name}, similar"] = (number, similar(graph, pairs, least), None)
        weights = LearnedEdges(**defence).weights(network, graph, pairs, seed)
        graphs[f"{name}, learned"] = (number, pairs, weights)
    return {
        name: {
            "flips": number,
            "accuracies": [
                network.accuracy(graph, pairs, weights, victim) for victim in range(config.victims)
            ],
        }
        for name, (number, pairs, weights) in Progress(graphs.items(), unit="graph", leave=False)
    }
