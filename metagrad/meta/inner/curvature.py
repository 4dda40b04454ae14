"""The curvature of the inner loss, for rules that ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor, nn

from metagrad.core.structured import Nested
from metagrad.curvature.likelihoods.output_losses import OutputLoss
from metagrad.curvature.likelihoods.recognition import evaluate
from metagrad.optim.curvature import needs_layers
from metagrad.optim.kronecker.layer_calls import CALL, LayerCalls, observed
from metagrad.optim.kronecker.layer_objective import LayerObjective
from metagrad.optim.kronecker.layers import known_layers
from metagrad.optim.objective import TapeObjective
from metagrad.optim.rules import Params, Rule
from metagrad.optim.tape_curvature import WeightedLoss


def check_layers(model: nn.Module, rule: Rule) -> None:
    """Check that a rule of layers supports the model's; warn of modules that it moves along the plain gradient.

    Args:
        model: The model.
        rule: The inner rule.
    """
    if not needs_layers(rule, 0):
        return
    known_layers(f"MAML(..., inner={CALL})", model)


@contextlib.contextmanager
def observed_layers(
    model: nn.Module | None, params: Params, rule: Rule, step: int
) -> Generator[LayerCalls | None, None, None]:
    """Note the calls of the layers of a model, if a rule asks for them at a step."""
    if model is None or not needs_layers(rule, step):
        yield None
        return
    with observed(model, tuple(params)) as calls:
        yield calls


def inner_curvature(
    loss: Callable[[Params], Tensor],
    params: Params,
    values: Tensor,
    grads: Params,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
    predictions: Nested | None,
    y: Nested,
    stacked: bool,
    *,
    create_graph: bool,
    calls: LayerCalls | None = None,
) -> TapeObjective:
    """Make the curvature of the loss of a task, or of the sum of the losses of stacked tasks.

    Args:
        loss: Parameters to the loss of the task, or the losses of stacked tasks.
        params: The parameters of the step.
        values: The loss at them.
        grads: The gradient, with its graph.
        loss_fn: What the loss is, by which its form is known; None if it is not.
        predictions: ``[n, ...]``, or ``[tasks, n, ...]``; None if they are not known. The form of a loss is known
            where they and the targets are tensors.
        y: Targets likewise.
        stacked: Whether there is a task axis.
        create_graph: Whether the step is differentiated through.
        calls: Those of the layers in the evaluation of the loss; None if they were not observed.
    """

    def losses() -> Sequence[WeightedLoss]:
        if loss_fn is None or not isinstance(predictions, Tensor) or not isinstance(y, Tensor):
            return ()
        parts = zip(predictions, y, strict=True) if stacked else [(predictions, y)]
        known = [evaluate(loss_fn, prediction, target).known for prediction, target in parts]
        if any(part is None for part in known):
            return ()
        loss = StackedLoss(known) if stacked else known[0]  # type: ignore[arg-type]
        return [WeightedLoss(loss, loss.output.new_ones(()))]  # type: ignore[union-attr, list-item]

    if calls is None:
        return TapeObjective.known(loss, params, values, grads, losses=losses, create_graph=create_graph)
    return LayerObjective.observing(
        calls, loss, params, values, grads, losses=losses, create_graph=create_graph
    )


class StackedLoss(OutputLoss):
    """The sum of the losses of several tasks, each of a prediction of its own.

    Args:
        parts: The losses of the tasks, of outputs of one shape.
    """

    def __init__(self, parts: Sequence[OutputLoss]) -> None:
        self.parts = parts
        self.output = torch.stack([part.output for part in parts])
        self.scale = torch.stack([part.scale for part in parts])
        self.count = None

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Hessian, which is block-diagonal over tasks."""
        return torch.stack([part.hessian_product(v) for part, v in zip(self.parts, vectors, strict=True)])

    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Fisher matrix, likewise."""
        return torch.stack([part.fisher_product(v) for part, v in zip(self.parts, vectors, strict=True)])

    def root_product(self, vectors: Tensor, *, transpose: bool = False) -> Tensor:
        """Multiply by the square root, likewise."""
        pairs = zip(self.parts, vectors, strict=True)
        return torch.stack([part.root_product(v, transpose=transpose) for part, v in pairs])

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw labels for every task."""
        return torch.stack([part.score(generator) for part in self.parts])
