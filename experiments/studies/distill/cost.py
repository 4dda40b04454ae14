"""What a meta-gradient costs: peak bytes and CPU seconds, over the length of the unroll, in every memory mode."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from experiments.run.allocations import peak_bytes
from experiments.run.seconds import cpu_seconds
from experiments.studies.characters import Examples
from experiments.studies.distill.coresets import coreset
from experiments.studies.distill.data import load
from experiments.studies.distill.learning import Distillation
from experiments.studies.distill.networks import NETWORKS
from experiments.studies.study import Result, Work

if TYPE_CHECKING:
    from experiments.studies.distill.schema import DistillConfig


def measure(config: DistillConfig, network: str, work: Work) -> Result:
    """Measure meta-gradients of real images through the training of a network."""
    data = load(config.classes, *config.drawers)
    start = coreset("random", data.train, data.train.x.flatten(1), config.per_class)
    chosen = torch.randperm(len(data.train.x))[: config.learn.batch]
    batch = data.train.at(chosen)

    def task(steps: int, memory: str) -> Distillation:
        make, lr = partial(NETWORKS[network], config.classes), config.learn.inner_time / steps
        return Distillation(make, start, steps=steps, momentum=config.momentum, lr=lr, memory=memory)

    seconds_of(task(1, "full"), batch)  # the first is slower than those that follow
    rows = []
    for steps, memory in product(config.cost.networks[network], config.cost.memories):
        costs = {"seconds": seconds_of(task(steps, memory), batch)}
        if work.seed == config.seeds[0]:  # bytes do not depend on it, and the profiler takes its time
            one = task(steps, memory)
            costs["peak"] = peak_bytes(lambda one=one: one.meta_gradient(one.fresh(), batch))
        rows.append({"steps": steps, "memory": memory, **costs})
    return {"rows": rows}


def seconds_of(task: Distillation, batch: Examples) -> float:
    """Return the CPU seconds of a meta-gradient."""
    return cpu_seconds(partial(task.meta_gradient, task.fresh(), batch))
