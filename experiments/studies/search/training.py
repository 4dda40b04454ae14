"""Architectures that are trained from scratch: found ones, and those of a random search."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.studies.characters import Examples
from experiments.studies.search.data import Data
from experiments.studies.search.space import Architecture, Network, drawn


@dataclass
class TrainingConfig:
    """Adam, at a rate that rises and falls in one cycle."""

    epochs: int = key("Passes over the drawings.")
    batch: int = key("Drawings of a step.")
    lr: float = key("The highest rate.")


@dataclass(frozen=True)
class Trainer:
    """Trains networks of a size on the characters of a seed."""

    config: TrainingConfig
    channels: int
    classes: int

    def accuracy(self, architecture: Architecture, on: Examples, judged: Examples, seed: int) -> float:
        """Return the percentage of drawings that a trained network classifies rightly."""
        torch.manual_seed(seed)
        network = Network(self.classes, self.channels, architecture)
        batches = on.batches(self.config.batch, seed)
        optimizer = torch.optim.Adam(network.parameters(), lr=self.config.lr)
        steps = self.config.epochs * len(batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.config.lr, total_steps=steps)
        for _ in range(self.config.epochs):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(network(x), y).backward()
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            return 100 * (network(judged.x).argmax(1) == judged.y).double().mean().item()

    def repeated(self, architecture: Architecture, data: Data, repeats: int, seed: int) -> float:
        """Return the mean accuracy on the test, of networks trained on all other drawings."""
        return statistics.mean(
            self.accuracy(architecture, data.both, data.test, seed=1000 * seed + i)
            for i in Progress(range(repeats), unit="network", leave=False)
        )

    def random_search(self, data: Data, number: int, repeats: int, seed: int) -> dict[str, object]:
        """Draw architectures, choose the one that is best on validation drawings, and judge all on the test."""
        networks = partial(Progress[Architecture], unit="network", leave=False)
        source = torch.Generator().manual_seed(seed)
        found, began = [drawn(source) for _ in range(number)], time.process_time()
        validation = [self.accuracy(one, data.train, data.validation, seed) for one in networks(found)]
        seconds = time.process_time() - began
        best = found[max(range(number), key=lambda i: validation[i])]
        return {
            "architecture": best,
            "accuracy": self.repeated(best, data, repeats, seed),
            "seconds": seconds,
            "architectures": found,
            "validation": validation,
            "accuracies": [self.repeated(one, data, 1, seed) for one in networks(found)],
        }
