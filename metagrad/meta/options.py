"""The further keyword arguments of MAML, and errors for unknown arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from metagrad.meta.execution.nonfinite import Nonfinite

_OTHER_NAMES = {
    "first_order": "order=1",
    "second_order": "order=2",
    **dict.fromkeys(("lr", "inner_lr", "fast_lr"), "inner=metagrad.optim.rules.sgd(lr=...)"),
    **dict.fromkeys(("inner_steps", "num_steps", "adaptation_steps"), "steps=..."),
}
"""Arguments by the names that other libraries use."""


@dataclass(frozen=True)
class Options:
    """Further keyword arguments of :class:`MAML`, which control how it runs tasks and stops their steps.

    Args:
        sparse: Names of embedding tables ``[V, D]``. Each task adapts only the rows that its examples use. The
            result is the same, and the cost does not depend on V. The gradient of the table is a
            :class:`metagrad.sparse.RowSparse`, also for a table that is shared by all tasks. ``inner`` must update
            rows independently, as all elementwise functional optimizers do. The model runs once more on each batch
            to find the rows.
        task_chunk: How many tasks run in one vectorized pass. ``None`` means all tasks, ``1`` means a Python loop.
        nonfinite: The treatment of a loss or meta-gradient that is NaN or Inf. ``"raise"`` raises an error
            that names the task. ``"skip"`` excludes the task from the loss and the gradient, and marks it in
            ``out.skipped``. A gradient that overflows only because the loss was scaled is left to the
            ``GradScaler``.
        truncate: Differentiate only through the last ``truncate`` inner steps. Earlier steps are treated as in
            first-order MAML. ``None`` differentiates through all steps.
        tolerance: A task stops when the norm of its inner gradient, over all parameters, is at most this number.
            ``out.steps`` counts the steps of each task.
    """

    sparse: Sequence[str] = ()
    task_chunk: int | None = None
    nonfinite: Nonfinite = "raise"
    truncate: int | None = None
    tolerance: float | None = None


def read_options(name: str, given: Mapping[str, Any]) -> Options:
    """Return the options among keyword arguments. Raise ``TypeError`` for an unknown argument."""
    refuse_unknown(name, given, [field.name for field in fields(Options)], _OTHER_NAMES)
    return Options(**given)


def refuse_unknown(
    name: str,
    given: Mapping[str, Any],
    known: Sequence[str],
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ``TypeError`` if a keyword argument is unknown. Names from other libraries suggest the known argument."""
    for key in given:
        if key not in known:
            hint = f"Did you mean {others[key]}? " if key in others else ""
            raise TypeError(
                f"{name}(...): unexpected keyword argument {key!r}. {hint}The options are {', '.join(known)}."
            )


def refuse_fixed(name: str, given: Mapping[str, Any], **reasons: str) -> None:
    """Raise ``TypeError`` if an algorithm sets a given keyword argument itself."""
    for key in reasons.keys() & given.keys():
        raise TypeError(f"{name}(..., {key}): {reasons[key]}")
