"""What every meta-learning algorithm is, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from metagrad.core.structured import Nested, arguments, restored
from metagrad.core.tree import Params, tree_leaves
from metagrad.meta.objective.norms import Norm


@runtime_checkable
class Algorithm(Protocol):
    """A meta-learning algorithm: a :class:`torch.nn.Module` whose parameters are the meta-parameters.

    Training, evaluation and plots need nothing else, so an algorithm that has these works with all of them.
    ``isinstance(value, Algorithm)`` says whether both methods are there.

    Example:
        >>> maml = metagrad.MAML(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss,
        ...                      inner=metagrad.optim.rules.sgd(lr=0.1), steps=1)
        >>> isinstance(maml, metagrad.meta.Algorithm)
        True
    """

    def __call__(self, batch: Any, *, steps: int | None = None) -> MetaOutput:
        """Call :meth:`forward`, as modules do."""
        ...

    def forward(self, batch: Any, *, steps: int | None = None) -> MetaOutput:
        """Adapt to the support examples of every task, and evaluate on its query examples.

        Args:
            batch: ``support`` and ``query``, each with ``x`` and ``y``, ``[tasks, examples, ...]``.
            steps: Another number of inner steps than that of training; 0 evaluates without adaptation.
        """
        ...

    def adapt(self, support: Any, *, steps: int | None = None) -> AdaptedModel:
        """Adapt to the support examples of every task; ``x`` and ``y``, ``[tasks, shots, ...]``."""
        ...


@dataclass
class MetaOutput:
    """The outcome of a meta-batch; everything is differentiable with respect to the meta-parameters.

    Attributes:
        loss: The meta-objective, a scalar: for MAML the mean query loss after adaptation, or of the
            weighted sums of the query losses after each step.
        query_losses: The query loss of each task after adaptation, ``[tasks]``.
        query_outputs: The prediction for the query inputs after adaptation, ``[tasks, queries, ...]``; where the
            model returns anything but a tensor, that, with tensors ``[tasks, ...]``.
        support_losses: The support loss before each inner step, ``[tasks, steps]``.
        steps: How many inner steps each task took before it stopped, ``[tasks]``, int64.
        skipped: Which tasks were left out because something was not finite, ``[tasks]``, bool; their losses are
            not part of ``loss``. The backward pass adds the tasks whose meta-gradient it drops.
        norm: The policy of the normalisation layers, as in ``MAML(..., norm=)``; None left that to the model.
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


@dataclass(frozen=True)
class AdaptedModel:
    """A model adapted to a batch of tasks; call it on inputs ``[tasks, n, ...]``.

    Attributes:
        params: The adapted parameters, ``[tasks, ...]`` each.
        support_losses: The support loss before each inner step, ``[tasks, steps]``.
        steps: How many inner steps each task took before it stopped, ``[tasks]``, int64.
        skipped: Which tasks have no gradient because something was not finite, ``[tasks]``, bool.
        predict: ``predict(params, inputs)``, what a call runs: the model at given parameters, tasks stacked in both.
        rows: For each table that ``MAML(..., sparse=)`` names, which of its rows ``params`` holds, ``[tasks, R]``.
    """

    params: Params
    support_losses: Tensor
    steps: Tensor
    skipped: Tensor
    predict: Callable[[Params, Nested], Nested] = field(repr=False)
    rows: Params = field(default_factory=dict[str, Tensor])

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
