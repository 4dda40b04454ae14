"""A meta-batch and its gradient as one compiled graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from metagrad.autograd.compile.compiled import CompileOptions
from metagrad.autograd.compile.value_and_grad import ValueAndGrad
from metagrad.core import _torch
from metagrad.core.tree import Structure, dissect
from metagrad.meta.programs import Programs, checked_tensors

if TYPE_CHECKING:
    from metagrad.meta.batching import Tasks
    from metagrad.meta.work import Work
    from metagrad.optim.rules import Params


class MetaBatch(NamedTuple):
    """A meta-batch as a function of a list of tensors.

    Attributes:
        work: What is done, but for the rule.
        structure: Where the tensors stand: parameters, tasks, hyper-parameters of the rule.
    """

    work: Work
    structure: Structure

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Adapt and judge: support losses, steps used, query losses, predictions."""
        params, tasks, rule = self.structure.fill(tensors)
        return checked_tensors(self.work.judge(params, tasks, rule))


_QUERY_LOSSES = 2  # among the results


class WholePrograms(Programs):
    """The compiled pieces of a MAML whose meta-batches are one graph each.

    Args:
        options: What ``compile=`` says.
    """

    def __init__(self, options: CompileOptions) -> None:
        super().__init__(options)
        self.meta_batch = ValueAndGrad(self, options.options, _QUERY_LOSSES, _alike)

    def judge_all(self, work: Work, params: Params, tasks: Tasks) -> tuple[Tensor, ...]:
        """Return what :meth:`Work.judge` does, from one graph."""
        rule = self.rule(work.inner.rule, params, work.steps)
        tensors, structure = dissect((params, tasks, rule))
        inner = dataclasses.replace(work.inner, programs=None)
        batch = MetaBatch(work._replace(inner=inner), structure)
        return self.meta_batch(lambda: self.check(batch, tensors), batch, tensors)


def _alike(grads: Sequence[Tensor], weights: Tensor) -> Sequence[Tensor] | None:
    """Weigh a gradient to which every task has contributed; all tasks must weigh alike, as in the mean."""
    first, *others = weights.tolist()
    alike = all(weight == first for weight in others)
    return _torch.foreach_mul(grads, first) if alike else None  # type: ignore[reportPrivateImportUsage]
