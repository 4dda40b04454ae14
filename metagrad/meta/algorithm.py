"""The protocol of meta-learning algorithms, and the types of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from metagrad.core.tree import Params, tree_leaves
from metagrad.meta.objective.norms import Norm
from metagrad.meta.objective.structured import Nested, arguments, restored


@runtime_checkable
class Algorithm(Protocol):
    """A meta-learning algorithm: a :class:`torch.nn.Module` whose parameters are the meta-parameters.

    Every algorithm with these methods works with the training, evaluation and plots of ``experiments``.
    ``isinstance(value, Algorithm)`` is true if both methods exist.

    Example:
        >>> maml = metagrad.MAML(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss,
        ...                      inner=metagrad.optim.rules.sgd(lr=0.1), steps=1)
        >>> isinstance(maml, metagrad.meta.Algorithm)
        True
    """

    def __call__(self, batch: Any, *, steps: int | None = None) -> MetaOutput:
        """Call :meth:`forward`."""
        ...

    def forward(self, batch: Any, *, steps: int | None = None) -> MetaOutput:
        """Adapt to the support examples of every task, and evaluate on its query examples.

        Args:
            batch: ``support`` and ``query``, each with ``x`` and ``y``, ``[tasks, examples, ...]``.
            steps: The number of inner steps, if it differs from training. 0 evaluates without adaptation.
        """
        ...

    def adapt(self, support: Any, *, steps: int | None = None) -> AdaptedModel:
        """Adapt to the support examples of every task, ``x`` and ``y``, ``[tasks, shots, ...]``."""
        ...


@dataclass
class MetaOutput:
    """The results of a meta-batch. All tensors are differentiable with respect to the meta-parameters.

    Attributes:
        loss: The meta-objective, a scalar. For MAML it is the mean query loss after adaptation. For MAML++ it is the
            weighted sum of the query losses after each step, averaged over tasks.
        query_losses: The query loss of each task after adaptation, ``[tasks]``.
        query_outputs: The predictions for the query inputs after adaptation, ``[tasks, queries, ...]``. If the model
            returns a nested value, its tensors are ``[tasks, ...]``.
        support_losses: The support loss before each inner step, ``[tasks, steps]``.
        steps: The number of inner steps of each task before it stopped, ``[tasks]``, int64.
        skipped: Whether each task was excluded because of NaN or Inf, ``[tasks]``, bool. ``loss`` excludes
            these tasks. The backward pass also marks the tasks whose meta-gradient it drops.
        norm: The policy of normalization layers, as in ``MAML(..., norm=)``.
    """

    loss: Tensor
    query_losses: Tensor
    query_outputs: Any
    support_losses: Tensor
    steps: Tensor
    skipped: Tensor
    norm: Norm | None = None

    def __repr__(self) -> str:
        """Show the loss and the shapes of the other tensors."""
        parts = [f"loss={self.loss.item():.4g}"]
        for name, value in vars(self).items():
            if name not in ("loss", "norm"):
                parts.append(
                    f"{name}={list(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
                )
        return f"MetaOutput({', '.join(parts)})"


# fully_shard of torch 2.11 averages only gradients that pass through a pytree.
torch.export.register_dataclass(MetaOutput)


@dataclass(frozen=True, repr=False)
class AdaptedModel:
    """A model that was adapted to a batch of tasks. Call it on inputs ``[tasks, n, ...]``.

    Attributes:
        params: The adapted parameters, ``[tasks, ...]`` each.
        support_losses: The support loss before each inner step, ``[tasks, steps]``.
        steps: The number of inner steps of each task before it stopped, ``[tasks]``, int64.
        skipped: Whether each task has no gradient because of NaN or Inf, ``[tasks]``, bool.
        predict: ``predict(params, inputs)`` calls the model with given parameters, ``[tasks, ...]`` each.
        rows: Indices of the rows that ``params`` holds, ``[tasks, R]``, for each table of ``MAML(..., sparse=)``.
    """

    params: Params
    support_losses: Tensor
    steps: Tensor
    skipped: Tensor
    predict: Callable[[Params, Nested], Nested]
    rows: Params = field(default_factory=dict[str, Tensor])

    def __repr__(self) -> str:
        tasks, steps = self.support_losses.shape
        return f"AdaptedModel({tasks} tasks, {steps} steps, params={list(self.params)})"

    def __call__(self, x: Any) -> Any:
        """Predict for the inputs of each task.

        Args:
            x: ``[tasks, n, ...]``, or a dict or a tuple of the arguments of the model as in :class:`MAML`.

        Returns:
            The output of the model, with tensors ``[tasks, n, ...]``. It is differentiable with respect to the
            meta-parameters and ``x``.

        Raises:
            ValueError: If the number of tasks differs from the adaptation.
        """
        num_tasks = self.support_losses.shape[0]
        inputs = arguments(x, "AdaptedModel(x): x")
        is_single = isinstance(inputs, Tensor)
        for tensor in tree_leaves(inputs):
            if tensor.ndim < 1 + is_single or tensor.shape[0] != num_tasks:
                raise ValueError(
                    f"AdaptedModel(x): the model was adapted to {num_tasks} tasks, so x must be "
                    f"[{num_tasks}, n, ...], got {tuple(tensor.shape)}."
                )
        return restored(self.predict(self.params, inputs))
