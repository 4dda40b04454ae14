"""What is differentiated: models, batches of tasks and numbers of inner steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.benchmarks.maml.models import Lookup, Transformer
from metagrad.tasks import Batch, Examples

MIB = 2**20


@dataclass(frozen=True)
class Workload:
    """A meta-learning problem.

    Attributes:
        about: The description in the table.
        model: The model, whose parameters are the meta-parameters.
        loss_fn: The loss of the examples of a task.
        batch: One meta-batch.
        lr: The learning rate of the inner steps, which are plain gradient descent.
        steps: Number of inner steps.
        budget: Budget in bytes, larger than the graph of one step and smaller than the graph of all steps.
        methods: The methods that run. Empty for all methods.
        adapt: The module whose parameters adapt. Empty for all parameters.
    """

    about: str
    model: nn.Module
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batch: Batch
    lr: float
    steps: int
    budget: int
    methods: tuple[str, ...] = ()
    adapt: str = ""

    @property
    def params(self) -> dict[str, Tensor]:
        """The meta-parameters."""
        return dict(self.model.named_parameters())

    @property
    def adapted(self) -> dict[str, Tensor]:
        """The parameters that adapt."""
        return {name: p for name, p in self.params.items() if name.startswith(self.adapt)}

    def double(self) -> Workload:
        """Return the same problem in float64, from the same weights."""
        return replace(self.to(torch.float64), budget=2 * self.budget)

    def to(self, target: torch.dtype | torch.device | str) -> Workload:
        """Return the same problem in a dtype or on a device."""
        return replace(self, model=copy.deepcopy(self.model).to(target), batch=self.batch.to(target))


def load(name: str) -> Workload:
    """Make a workload: the same weights and the same batch in every process."""
    torch.manual_seed(0)
    return WORKLOADS[name]()


def sinusoid(steps: int) -> Workload:
    """The regression of Finn et al. 2017, section 5.1."""
    batch = mg.tasks.Sinusoid(shots=10, queries=10).sample(25, generator=torch.Generator().manual_seed(0))
    return Workload(
        f"MLP 1-40-40-1, 25 tasks of 10 shots, {steps} steps",
        mg.models.MLP([1, 40, 40, 1]),
        F.mse_loss,
        batch,
        lr=0.01,
        steps=steps,
        budget=(4 + steps) * MIB // 4,
    )


def mlp(steps: int) -> Workload:
    """A wide MLP and one task: nothing to batch."""
    generator = torch.Generator().manual_seed(0)

    def examples() -> Examples:
        x = torch.randn(1, 32, 128, generator=generator)
        return Examples(x, torch.randint(10, (1, 32), generator=generator))

    return Workload(
        f"MLP 128-512-512-512-10, one task of 32 rows, {steps} steps",
        mg.models.MLP([128, 512, 512, 512, 10]),
        F.cross_entropy,
        Batch(examples(), examples()),
        lr=0.1,
        steps=steps,
        budget=(12 + 3 * steps // 2) * MIB,
    )


def conv4(num_tasks: int, steps: int, shots: int = 1) -> Workload:
    """The Omniglot network and protocol of Finn et al. 2017, on noise."""
    generator = torch.Generator().manual_seed(0)

    def examples(shots: int) -> Examples:
        images = torch.rand(num_tasks, 5 * shots, 1, 28, 28, generator=generator)
        return Examples(images, torch.arange(5).repeat_interleave(shots).repeat(num_tasks, 1))

    return Workload(
        f"Conv4 of 64 filters, 5-way {shots}-shot, 15 queries, {num_tasks} tasks, {steps} steps",
        mg.models.Conv4(5),
        F.cross_entropy,
        Batch(examples(shots), examples(15)),
        lr=0.4,
        steps=steps,
        budget=num_tasks * (16 + 2 * steps) * MIB,
    )


def anil(num_tasks: int, shots: int, steps: int) -> Workload:
    """Conv4 with only the head adapted (Raghu et al. 2020)."""
    work = conv4(num_tasks, steps, shots)
    return replace(work, about=f"{work.about}; only the head adapts", adapt="head", methods=HEADS)


def transformer(
    layers: int, num_tasks: int, rows: int, steps: int, methods: tuple[str, ...] = ()
) -> Workload:
    """Sequences of 32 vectors of 128 numbers, four heads."""
    generator = torch.Generator().manual_seed(0)

    def examples() -> Examples:
        x = torch.randn(num_tasks, rows, 32, 128, generator=generator)
        return Examples(x, torch.randint(10, (num_tasks, rows), generator=generator))

    return Workload(
        f"transformer of {layers} layers, d=128, sequence 32, {num_tasks} tasks of {rows} rows, {steps} steps",
        Transformer(layers),
        F.cross_entropy,
        Batch(examples(), examples()),
        lr=0.01,
        steps=steps,
        budget=num_tasks * layers * rows * steps * MIB // 2,
        methods=methods,
    )


def table(rows: int) -> Workload:
    """An embedding table. A task looks up only a few rows."""
    generator = torch.Generator().manual_seed(0)

    def examples() -> Examples:
        ids = torch.randint(rows, (1, 256), generator=generator)
        return Examples(ids, torch.randn(1, 256, generator=generator))

    return Workload(
        f"table of {rows} x 32, one task of 256 lookups, 5 steps",
        Lookup(rows, 32),
        F.mse_loss,
        Batch(examples(), examples()),
        lr=0.1,
        steps=5,
        budget=rows * 32 * 4 * 8,
        methods=TABLES,
    )


HEADS = (
    "naive loop",
    'metagrad, "full"',
    'metagrad, "step"',
    'metagrad, "full", compiled',
    "torch.func grad + vmap",
    "learn2learn",
)
TABLES = ("naive loop", 'metagrad, "full"', "metagrad, rows of tables", "torch.func grad + vmap")

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "sinusoid": partial(sinusoid, 5),
    "sinusoid-50": partial(sinusoid, 50),
    "mlp-20": partial(mlp, 20),
    "mlp-50": partial(mlp, 50),
    "conv4-4-1": partial(conv4, 4, 1),
    "conv4-32-1": partial(conv4, 32, 1),
    "conv4-4-5": partial(conv4, 4, 5),
    "conv4-32-5": partial(conv4, 32, 5),
    "anil-4-5": partial(anil, 4, 1, 5),
    "transformer-5": partial(transformer, 2, 4, 4, 5),
    "transformer-20": partial(transformer, 2, 4, 4, 20),
    "table-10k": partial(table, 10**4),
    "table-100k": partial(table, 10**5),
    "table-1m": partial(table, 10**6),
}
"""The last number of a name is the number of inner steps, or the number of rows of a table."""
