"""Evaluation: query loss and accuracy over many tasks, before and after adaptation, with 95 % intervals."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from experiments.run.progress import Progress
from experiments.run.ranks import Ranks
from metagrad.curvature.estimators.estimate import student_t
from metagrad.tasks import PADDING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from metagrad.meta import Algorithm
    from metagrad.tasks import Batch, TaskDistribution


class Interval(NamedTuple):
    """A mean over tasks and the half-width of its 95 % confidence interval."""

    mean: float
    ci95: float
    tasks: int

    def __str__(self) -> str:
        """Return `mean +- half-width` with the digits the half-width supports."""
        digits = 1 - math.floor(math.log10(self.ci95)) if self.ci95 > 0 and math.isfinite(self.ci95) else 2
        return f"{self.mean:.{max(digits, 0)}f} +- {self.ci95:.{max(digits, 0)}f}"


def mean_interval(values: Tensor) -> Interval:
    r"""Return the mean of independent values with its 95 % confidence interval.

    .. math::
        \bar{x} \pm t_{0.975, n-1} \, s / \sqrt{n}

    Args:
        values: One value per task, shape [tasks], for at least two tasks.
    """
    number = len(values)
    spread = values.double().std().item() / math.sqrt(number)
    return Interval(values.double().mean().item(), student_t(0.95, number - 1) * spread, number)


def evaluate(
    algorithm: Algorithm,
    tasks: TaskDistribution,
    *,
    num_tasks: int,
    steps: int | None,
    chunk: int,
    generator: torch.Generator,
    device: torch.device,
    ranks: Ranks | None = None,
) -> dict[str, Interval]:
    """Adapt to tasks in chunks and return query metrics before and after `steps` inner steps.

    Each process evaluates its share of every chunk, and all processes return the same values.

    Returns:
        `query_loss_before`, `query_loss`, and for classification `accuracy_before(%)`, `accuracy(%)`. If `steps` is
        None (algorithms without inner steps), there are no values before adaptation.
    """
    ranks = ranks or Ranks()
    judged = {"_before": 0, "": steps} if steps is not None else {"": None}
    found: list[dict[str, Tensor]] = []
    with _policy_of_norms(algorithm):
        for batch in batches(tasks, num_tasks, chunk, generator=generator, device=device, ranks=ranks):
            found.append({})
            for suffix, number in judged.items() if batch.num_tasks else ():
                found[-1].update(_judge(algorithm, batch, number, suffix))
    parts: dict[str, list[Tensor]] = {}
    for of_chunk in zip(*ranks.gathered(found), strict=True):
        for name, values in (item for of_process in of_chunk for item in of_process.items()):
            parts.setdefault(name, []).append(values)
    return {name: mean_interval(torch.cat(values)) for name, values in parts.items()}


def batches(
    tasks: TaskDistribution,
    num_tasks: int,
    chunk: int,
    *,
    generator: torch.Generator,
    device: torch.device,
    ranks: Ranks,
) -> Iterator[Batch]:
    """Draw `num_tasks` tasks, at most `chunk` at a time, and yield the tasks of this process, which may be none."""
    starts = range(0, num_tasks, chunk)
    for start in Progress(starts, unit="chunk", hidden=not ranks.is_first, leave=False):
        drawn = tasks.sample(min(chunk, num_tasks - start), generator=generator)
        yield ranks.share(drawn).to(device=device)


def accuracies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the accuracy of each task in percent, shape [tasks], without padding."""
    is_right = (logits.argmax(-1) == labels).double().sum(-1)
    return 100 * is_right / (labels != PADDING).sum(-1)


def is_classification(labels: Tensor) -> bool:
    """Return whether labels are classes instead of real-valued targets."""
    return not labels.is_floating_point()


@contextlib.contextmanager
def _policy_of_norms(algorithm: Algorithm) -> Iterator[None]:
    """Set an algorithm with a `norm` policy to evaluation mode inside the context."""
    if not isinstance(algorithm, nn.Module) or getattr(algorithm, "norm", None) is None:
        yield
        return
    modes = {module: module.training for module in algorithm.modules()}
    algorithm.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.no_grad()
def _judge(algorithm: Algorithm, batch: Batch, steps: int | None, suffix: str) -> dict[str, Tensor]:
    is_labelled = is_classification(batch.query.y)
    names = [f"query_loss{suffix}", *([f"accuracy{suffix}(%)"] if is_labelled else [])]
    try:
        out = algorithm(batch, steps=steps)
    except FloatingPointError:
        if getattr(algorithm, "nonfinite", "raise") != "skip":
            raise
        # All tasks of this process failed. If only some fail, their losses are NaN already.
        return dict.fromkeys(names, torch.full((batch.num_tasks,), math.nan))
    metrics = {names[0]: out.query_losses}
    if is_labelled:
        metrics[names[1]] = accuracies(out.query_outputs, batch.query.y)
    return {name: values.cpu() for name, values in metrics.items()}
