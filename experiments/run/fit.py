"""Check that model, loss and tasks fit together and that derivatives are correct, before anything is written."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING

import torch

import metagrad as mg
from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.core.tree import tree_map
from metagrad.meta.objective.structured import arguments, call_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from experiments.run.build import Parts
    from metagrad.tasks import Batch

CLASSIFIERS = (mg.ProtoMAML, mg.ProtoNet, mg.R2D2)
ONCE, TWICE = (mg.Reptile, mg.iMAML), (mg.optim.AdaHessian, mg.optim.NewtonCG, mg.optim.SophiaH)
"""Algorithms whose meta-gradient has no derivative, and optimizers that need this derivative."""
OF_OUTPUTS = (mg.optim.GaussNewton, mg.optim.SophiaG)
"""Optimizers that need the loss as one call of a loss function."""


@torch.no_grad()
def check_fit(call: str, parts: Parts, draw: Callable[[], Batch]) -> None:
    """Compute the loss of the model on one task. Random states, buffers and parameters stay the same.

    Args:
        call: The name of the program in errors.
        parts: The algorithm, the model and the loss.
        draw: Returns a batch of one task.

    Raises:
        ValueError: The model raises for the inputs of the task, the loss raises for the predictions, or the algorithm
            needs classes and the task has none.
    """
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # mse_loss would broadcast
        support = draw().support
        x, y = tree_map(lambda tensor: tensor[0], (support.x, support.y))
        if isinstance(parts.algorithm, CLASSIFIERS) and isinstance(y, torch.Tensor) and y.is_floating_point():
            raise ValueError(
                f"{call}: {type(parts.algorithm).__name__} classifies, but the targets of the task are real numbers. "
                "Choose task=omniglot, fewshot or folder, or task.classify=true of task=tabular."
            )
        if isinstance(parts.algorithm, ONCE) and isinstance(parts.optimizer, TWICE):
            raise ValueError(
                f"{call}: {type(parts.optimizer).__name__} needs second derivatives of the meta-objective, and the "
                f"meta-gradient of {type(parts.algorithm).__name__} has none. Choose optimizer=adam, lbfgs or soap."
            )
        if isinstance(parts.algorithm, mg.meta.MAMLPlusPlus) and isinstance(parts.optimizer, OF_OUTPUTS):
            raise ValueError(
                f"{call}: {type(parts.optimizer).__name__} needs one loss of predictions, and MAMLPlusPlus adds the "
                "losses after each inner step. Choose another algorithm=, or optimizer=adam, lbfgs or soap."
            )
        try:
            parts.loss_fn(call_on(copy.deepcopy(parts.model), arguments(x, f"{call}: the inputs")), y)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError, UserWarning) as error:
            raise ValueError(
                f"{call}: the model and the tasks do not fit: on inputs {_shapes(x)} and targets "
                f"{_shapes(y)} of a task, {type(parts.model).__name__} or the loss says: "
                f"{str(error).splitlines()[0].rstrip('.')}. Change model=, task= or their keys "
                "(model.sizes, task.ways)."
            ) from error


def preflight(parts: Parts, draw: Callable[[], Batch]) -> str:
    """Return the report of :func:`metagrad.preflight` on a meta-batch. Random states stay the same.

    Raises:
        MissingDerivative: A derivative that training needs is incorrect or missing. The message holds the report.
    """
    with torch.random.fork_rng():
        report = mg.preflight(parts.module, draw())
    if not report.ok:
        raise MissingDerivative(
            f"train: preflight=true found derivatives that are incorrect or missing.\n{report}"
        )
    return str(report)


def _shapes(value: object) -> object:
    return tree_map(lambda tensor: list(tensor.shape), value)
