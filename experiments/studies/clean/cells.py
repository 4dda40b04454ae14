"""The cells of a cleaning: what is trained on as it is, and each way of learning weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.studies.clean.cleaning import (
    Found,
    Watch,
    accuracy,
    learn_loss,
    learn_weights,
    losses,
    methods,
)
from experiments.studies.clean.drawings import Data, load
from experiments.studies.clean.judging import detection, judged, validation_alone
from experiments.studies.clean.reweighting import reweight
from experiments.studies.clean.schema import CleanConfig
from experiments.studies.study import Cell, Result, Work

REFERENCES = ("everything", "clean part", "validation alone", "agreeing")


def cells(config: CleanConfig) -> list[Cell]:
    """List the references, and the ways of learning weights that are asked for, each with every seed."""
    runs: dict[str, Callable[[Work], Result]] = {
        name: partial(reference, config=config, name=name) for name in REFERENCES
    }
    runs |= {name: partial(learned, config=config, name=name) for name in config.methods}
    return [Cell(name, seed, run) for name, run in runs.items() for seed in config.seeds]


def reference(work: Work, config: CleanConfig, name: str) -> Result:
    """Train on what needs no weights to be learned."""
    data = data_of(config, work.seed)
    ones = torch.ones_like(data.train.x[:, 0])
    if name == "everything":
        return judged(data, ones, config.penalties)
    if name == "clean part":
        return judged(data, ones * ~data.wrong, config.penalties)
    params = validation_alone(data, config.penalties)
    if name == "validation alone":
        return {"accuracy": accuracy(data.test, params)}
    agrees = (data.train.x @ params["weight"]).argmax(1) == data.train.y
    found = judged(data, ones * agrees, config.penalties)
    return found | detection(-losses(data.train, params), data.wrong)


def learned(work: Work, config: CleanConfig, name: str) -> Result:
    """Learn weights, and train with them."""
    data = data_of(config, work.seed)
    total = config.reweight.steps if name == "reweight" else config.loop.steps
    watch = Watch(data.test, max(total // config.points, 1), work.log)
    found = _found(data, config, name, watch)
    return {
        **judged(data, found.weights, config.penalties),
        **detection(found.weights, data.wrong),
        "at_the_end": accuracy(data.test, found.params),
        "seconds": watch.spent,
        "mib": found.peak / 2**20,
        "curve": {"seconds": watch.seconds, "accuracy": watch.accuracies},
        "shares": shares(found.weights, data.wrong),
    }


def _found(data: Data, config: CleanConfig, name: str, watch: Watch) -> Found:
    if name == "reweight":
        return reweight(data, config, watch)
    known = methods(config.loop)
    if name == "learned loss":
        return learn_loss(data, config, known["Unroll"], watch)
    return learn_weights(data, config, known[name], watch)


def shares(weights: Tensor, wrong: Tensor, bins: int = 20) -> dict[str, Any]:
    """Return the parts of the wrong and of the right examples whose weights are in each of equal bins."""
    return {
        which: (torch.histc(weights[chosen].double(), bins, 0, 1) / chosen.sum()).tolist()
        for which, chosen in (("wrong", wrong), ("right", ~wrong))
    }


def data_of(config: CleanConfig, seed: int) -> Data:
    """Load the drawings of a seed."""
    data = config.data
    training, validation, test = data.drawers
    return load(data.alphabets, data.characters, (training, validation, test), data.wrong, data.whiten, seed)
