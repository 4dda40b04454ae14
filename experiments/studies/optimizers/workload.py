"""What optimizers are compared on: a model, its loss, and examples to train on and to be judged by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.run.build import build, generator, in_keys
from experiments.studies import characters
from experiments.studies.characters import Examples
from experiments.studies.optimizers import poisson
from experiments.studies.optimizers.schema import (
    Characters,
    ConvClassification,
    OfDrawings,
    Physics,
    Reconstruction,
    TransformerClassification,
    Workload,
)

CHUNK = 1000  # examples that are judged at once


@dataclass(frozen=True)
class Problem:
    """A model and its data; `judged` are the training examples that its loss is measured on."""

    model: nn.Module
    reconstructs: bool
    train: Examples
    judged: Examples
    test: Examples
    penalty: float = 0.0

    def loss(self, examples: Examples) -> Tensor:
        """Return the mean loss: the cross-entropy of classes, or of an image's pixels, summed over them."""
        output = self.model(examples.x)
        if self.reconstructs:
            total = F.binary_cross_entropy_with_logits(output, examples.y, reduction="sum")
            return total / len(examples.x)
        loss = F.cross_entropy(output, examples.y)
        if not self.penalty:
            return loss
        return loss + self.penalty / 2 * sum(p.square().sum() for p in self.model.parameters())

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Measure losses, and of a classifier how often it is right."""
        return {
            name: value
            for part, examples in (("train", self.judged), ("test", self.test))
            for name, value in self._judged(part, examples).items()
        }

    def _judged(self, part: str, examples: Examples) -> dict[str, float]:
        chunks = list(map(Examples, examples.x.split(CHUNK), examples.y.split(CHUNK)))
        total = sum(len(chunk.x) * self.loss(chunk).item() for chunk in chunks)
        metrics = {f"loss/{part}": total / len(examples.x)}
        if not self.reconstructs:
            hits = sum(int((self.model(chunk.x).argmax(1) == chunk.y).sum()) for chunk in chunks)
            metrics[f"accuracy/{part}(%)"] = 100 * hits / len(examples.x)
        return metrics


class PhysicsProblem(Problem):
    """A network that solves Poisson's equation: its loss is of residuals, its test the distance from the solution."""

    def loss(self, examples: Examples) -> Tensor:
        """Return the mean of squared residuals, inside and on the boundary."""
        residuals = poisson.residuals(self.model, *examples)
        return F.mse_loss(residuals, torch.zeros_like(residuals))

    def judge(self) -> dict[str, float]:
        """Measure the loss, and the relative error of the solution in the L2 norm."""
        with torch.enable_grad():
            loss = self.loss(self.judged).item()
        with torch.no_grad():
            wrong = self.model(self.test.x)[:, 0] - self.test.y
        return {"loss/train": loss, "error/test": (wrong.norm() / self.test.y.norm()).item()}


def problem(config: Workload, seed: int, device: torch.device, allow: Sequence[str] = ()) -> Problem:
    """Build the model of a workload, the same for every optimizer of a seed, and load its data."""
    model = build(config.model, allow=allow).to(device)  # type: ignore[reportAttributeAccessIssue]
    if isinstance(config, Physics):
        train, test = (
            Examples(*(part.to(device) for part in both)) for both in poisson.points(config.points)
        )
        return PhysicsProblem(model, False, train, train, test)
    assert isinstance(config, OfDrawings)
    reconstructs = isinstance(config, Reconstruction)
    images = drawings(config.data).to(device, next(model.parameters()).dtype)
    is_flat = not isinstance(config, (ConvClassification, TransformerClassification))
    images = images.flatten(2) if is_flat else images.unsqueeze(2)
    held_out = config.data.held_out
    train, test = characters.by_drawers(images, images.shape[1] - held_out, held_out)
    if reconstructs:
        train, test = train._replace(y=train.x), test._replace(y=test.x)
    chosen = torch.randperm(len(train.x), generator=generator(seed, "validation"))[: config.judged].to(device)
    return Problem(model, reconstructs, train, train.at(chosen), test, config.penalty)


def drawings(config: Characters) -> Tensor:
    """Load characters, [characters, drawings, 28, 28] with ink = 1 on 0.

    Raises:
        ValueError: The files are not there, or there are fewer characters.
    """
    options = {"root": config.root, "resize": config.resize, "download": config.download}
    try:
        return characters.load("background", config.count, key="optimizers: workload.data.count", **options)
    except ValueError as error:
        raise ValueError(in_keys("workload.data", error)) from error


def batches(examples: Examples, batch_size: int, seed: int) -> Iterator[Examples]:
    """Yield batches for ever, from one random order of the examples after another.

    Raises:
        ValueError: There are fewer examples than a batch has.
    """
    number = len(examples.x)
    if batch_size > number:
        raise ValueError(
            f"optimizers: batch_size must be at most {number}, the training examples, got {batch_size}."
        )
    source, waiting = generator(seed, "train"), torch.empty(0, dtype=torch.long)
    while True:
        if len(waiting) < batch_size:
            waiting = torch.cat([waiting, torch.randperm(number, generator=source)])
        chosen, waiting = waiting[:batch_size].to(examples.x.device), waiting[batch_size:]
        yield examples.at(chosen)
