"""What MAML returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from metagrad.core.tree import tree_leaves
from metagrad.meta.structured import Nested, arguments, restored
from metagrad.optim.rules import Params


@dataclass(frozen=True)
class MAMLOutput:
    """The outcome of a meta-batch; everything is differentiable with respect to the meta-parameters.

    Attributes:
        loss: The mean query loss after adaptation, a scalar: the meta-objective.
        losses: The support loss before each inner step, ``[tasks, steps]``.
        query_losses: The query loss of each task after adaptation, ``[tasks]``.
        query_logits: The prediction for the query inputs after adaptation, ``[tasks, queries, ...]``; where the
            model returns anything but a tensor, that, with tensors ``[tasks, ...]``.
        used: How many inner steps each task took before it stopped, ``[tasks]``, int64.
        skipped: Which tasks were left out because something was not finite, ``[tasks]``, bool; their losses are
            not part of ``loss``. The backward pass adds the tasks whose meta-gradient it drops.
    """

    loss: Tensor
    losses: Tensor
    query_losses: Tensor
    query_logits: Any
    used: Tensor
    skipped: Tensor


@dataclass(frozen=True)
class Adapted:
    """A model adapted to a batch of tasks; call it on inputs ``[tasks, n, ...]``.

    Attributes:
        params: The adapted parameters, ``[tasks, ...]`` each.
        losses: The support loss before each inner step, ``[tasks, steps]``.
        used: How many inner steps each task took before it stopped, ``[tasks]``, int64.
        skipped: Which tasks have no gradient because something was not finite, ``[tasks]``, bool.
        rows: Which rows of a table its parameter holds, ``[tasks, R]``, by the name of the table: of those that
            ``MAML(..., sparse=)`` names.
    """

    params: Params
    losses: Tensor
    used: Tensor
    skipped: Tensor
    predict: Callable[[Params, Nested], Nested] = field(repr=False)
    rows: Params = field(default_factory=dict)

    def __call__(self, x: Any) -> Any:
        """Predict for the inputs of each task.

        Args:
            x: ``[tasks, n, ...]``; or, as in :class:`MAML`, a dict or a tuple of the arguments of the model.

        Returns:
            What the model returns, with tensors ``[tasks, n, ...]``, differentiable with respect to the
            meta-parameters and ``x``.

        Raises:
            ValueError: The number of tasks is another than the model was adapted to.
        """
        num_tasks = self.losses.shape[0]
        inputs = arguments(x, "Adapted(x): x")
        is_single = isinstance(inputs, Tensor)
        for tensor in tree_leaves(inputs):
            if tensor.ndim < 1 + is_single or tensor.shape[0] != num_tasks:
                raise ValueError(
                    f"Adapted(x): the model was adapted to {num_tasks} tasks, so x must be [{num_tasks}, n, ...], "
                    f"got {tuple(tensor.shape)}."
                )
        return restored(self.predict(self.params, inputs))
