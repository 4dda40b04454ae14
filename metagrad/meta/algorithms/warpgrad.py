"""WarpGrad: warp layers that are learned to precondition the inner steps, along their trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import nn

from metagrad.meta.execution.executor import TaskExecutor
from metagrad.meta.inner.stepwise import StepwiseLoop
from metagrad.meta.maml import MAML
from metagrad.meta.objective.task_loss import LossFn
from metagrad.meta.objective.tasks import Tasks
from metagrad.optim.rules import Rule

Init = Literal["learned", "fixed"]


class WarpGrad(MAML):
    r"""WarpGrad: learn warp layers, which all tasks share, such that a step from anywhere on a trajectory leads far.

    .. math::
        \min_\omega \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} \sum_{t=0}^{T-1}
            L_i^{\mathrm{query}}\bigl(\phi_t - \alpha \nabla_\phi L_i^{\mathrm{support}}(\phi_t, \omega), \;
            \omega\bigr)

    with :math:`\omega` the warp layers, which do not adapt, and :math:`\phi_t` the other parameters after t steps.
    These are constants in the sum: each term is differentiated through one step alone. So no graph of a step is kept,
    and memory does not grow with the steps. Derivatives of other results than ``loss``, and second ones, take the
    steps again with their graphs, as do :func:`torch.func.grad` and ``sparse``.

    What tasks start from is learned by the same sum if ``init`` is ``"learned"``: as in first-order MAML, parameters
    on the trajectory move as it does. The paper leaves open how it is learned.

    Args:
        model: As of :class:`MAML`, with warp layers between those that adapt.
        loss_fn: As of :class:`MAML`.
        warp: The names of the warp layers, as patterns of parameters or modules.
        inner: As of :class:`MAML`.
        steps: The number of inner steps.
        init: Whether what tasks start from is ``"learned"``, or ``"fixed"``: then it gets no gradient.
        **arguments: As of :class:`MAML`, without ``adapt``, ``compile``, ``memory``, ``query_weights`` and
            ``truncate``.

    Raises:
        ValueError: The model has no such layers, ``init`` is something else, or :class:`MAML` refuses the other
            arguments; in a call, the model or the loss reads a tensor that requires grad and is no parameter of it.

    Example:
        >>> model = torch.nn.Sequential()
        >>> model.add_module("task", torch.nn.Linear(1, 4))
        >>> model.add_module("warp", torch.nn.Linear(4, 1))
        >>> learner = metagrad.WarpGrad(model, torch.nn.functional.mse_loss,
        ...                             inner=metagrad.optim.rules.sgd(lr=0.1), steps=5)
        >>> batch = metagrad.tasks.Sinusoid(shots=10, queries=10).sample(4)
        >>> learner(batch).loss.backward()
        >>> model.warp.weight.grad.shape, list(learner.adapt(batch.support).params)
        (torch.Size([1, 4]), ['task.weight', 'task.bias'])

    References:
        Flennerhag, Rusu, Pascanu, Visin, Yin, Hadsell, "Meta-learning with warped gradient descent", ICLR 2020,
        sections 2.3 and 2.4, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        warp: str | Sequence[str] = "warp*",
        inner: Rule,
        steps: int,
        init: Init = "learned",
        **arguments: Any,
    ) -> None:
        if init not in get_args(Init):
            raise ValueError(f'WarpGrad(..., init): expected "learned" or "fixed", got {init!r}.')
        adapt = [f"!{pattern}" for pattern in ([warp] if isinstance(warp, str) else warp)]
        fixed = {"adapt": adapt, "memory": "full", "truncate": None, "query_weights": _one, "compile": False}
        super().__init__(model, loss_fn, inner=inner, steps=steps, **fixed, **arguments)
        self._fix("adapted", "truncate", "query_weights")
        self.init: Init = init

    def _executor(self, steps: int | None, tasks: Tasks) -> TaskExecutor:
        executor = super()._executor(steps, tasks)
        loop = StepwiseLoop(**vars(executor.inner), learns_start=self.init == "learned")
        return dataclasses.replace(executor, inner=loop)


def _one(step: int) -> float:
    """Return the weight of a step."""
    return 1.0
