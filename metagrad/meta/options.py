"""The further keyword arguments of MAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metagrad.meta.execution.nonfinite import Nonfinite


@dataclass(frozen=True)
class Options:
    """How :class:`MAML` runs tasks and ends their steps: its further keyword arguments.

    Args:
        sparse: The names of embedding tables ``[V, D]`` of which each task adapts the rows that its examples look
            up: the same result at a cost that does not depend on V, and the gradient of the table is a
            :class:`metagrad.sparse.RowSparse`. The rule must treat rows alike and one by one, as all elementwise
            ones do. The model runs once more on each batch, to find the rows. A table that does not adapt is shared
            by all tasks, and its gradient is such rows too.
        task_chunk: How many tasks run together; None means all, 1 is a loop.
        nonfinite: How a loss or a meta-gradient that is NaN or infinite is handled: ``"raise"`` an error that
            names the task, or ``"skip"``, which leaves such tasks out of the loss and its gradient, computing the
            others once more, and marks them in ``out.skipped``. A gradient that overflows only because the loss was
            scaled passes: that is for the ``GradScaler`` to see.
        truncate: Differentiate through only the last so many inner steps, and take those before as first-order
            MAML takes all of them; None differentiates through all.
        tolerance: A task takes no further step once the norm of its inner gradient (over all parameters) is at most
            this; ``out.steps`` counts the steps that each task took.
    """

    sparse: Sequence[str] = ()
    task_chunk: int | None = None
    nonfinite: Nonfinite = "raise"
    truncate: int | None = None
    tolerance: float | None = None
