"""Leap: start where the paths of the tasks over their losses are short."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from metagrad.meta.algorithms.reptile import Examples, TrajectoryLearner
from metagrad.meta.inner.loop import InnerLoop
from metagrad.meta.inner.trajectories import PathLengthLoop, TrajectoryLoop
from metagrad.meta.objective.task_loss import LossFn
from metagrad.optim.rules import Rule


class Leap(TrajectoryLearner):
    r"""Learn parameters from which the paths that the tasks take over the surfaces of their losses are short.

    .. math::
        \min_\theta \; \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} \sum_{t} d_t^p, \quad \phi_0 = \theta, \qquad
        d_t^2 = \lVert \phi_{t+1} - \phi_t \rVert^2 + \bigl(L_i(\phi_{t+1}) - L_i(\phi_t)\bigr)^2

    The meta-gradient pulls each point of a path towards the next one, which is held, and takes the derivative of each
    with respect to the first as the identity:

    .. math::
        \nabla_\theta := - \frac{p}{|\mathcal T|} \sum_i \sum_t d_t^{p-2}
            \Bigl( \phi_{t+1} - \phi_t + \bigl(L_i(\phi_{t+1}) - L_i(\phi_t)\bigr) \nabla L_i(\phi_t) \Bigr)

    No graph of a step is kept. The value of ``loss`` is the mean query loss after adaptation, as MAML's, and a second
    derivative is refused. The protocol is that of :class:`Reptile`.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        inner: As of :class:`MAML`, any rule; nothing of it is learned.
        steps: As of :class:`MAML`; the paper takes hundreds. Few steps that end far from a minimum make a short
            path too, so that nothing is learned from them.
        power: p: 1 for the length of a path, 2 for its energy.
        stabilize: Take a step that raises the loss as one that lowers it by as much (the paper's stabilizer), so that
            the meta-gradient never climbs.
        examples: As of :class:`Reptile`.
        **arguments: As of :class:`MAML`, without ``adapt``, ``order``, ``truncate``, ``query_weights``,
            ``proximal``, ``hypergradient`` and ``compile``.

    Raises:
        ValueError: As :class:`Reptile`; or ``power`` is neither 1 nor 2.
        TypeError: As :class:`MAML`.

    Example:
        >>> learner = metagrad.Leap(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss,
        ...                         inner=metagrad.optim.rules.sgd(lr=0.1), steps=20)
        >>> batch = metagrad.tasks.Sinusoid(shots=10, queries=10).sample(4)
        >>> learner(batch).loss.backward()
        >>> learner.model.weight.grad.shape
        torch.Size([1, 1])

    References:
        Flennerhag, Moreno, Lawrence, Damianou, "Transferring knowledge across learning processes", ICLR 2019,
        section 2 and algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        power: Literal[1, 2] = 1,
        stabilize: bool = True,
        examples: Examples = "all",
        **arguments: Any,
    ) -> None:
        if power not in (1, 2):
            raise ValueError(f"Leap(..., power): expected 1, a length, or 2, an energy, got {power!r}.")
        arguments = {**arguments, "examples": examples}
        super().__init__(model, loss_fn, inner=inner, steps=steps, compile=False, **arguments)
        self.power = power
        self.stabilize: bool = stabilize

    def _loop(self, inner: InnerLoop, *, joins: bool) -> TrajectoryLoop:
        return PathLengthLoop(**vars(inner), joins=joins, power=self.power, stabilize=self.stabilize)
