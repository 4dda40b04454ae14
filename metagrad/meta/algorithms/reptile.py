"""Reptile: the meta-gradient is the initial minus the adapted parameters."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from metagrad.core.checks import check_choice
from metagrad.core.tree import LossFn
from metagrad.meta.inner.displacement import DisplacementLoop
from metagrad.meta.inner.loop import InnerLoop
from metagrad.meta.maml import MAML
from metagrad.meta.objective.tasks import Tasks
from metagrad.meta.options import refuse_fixed
from metagrad.optim.hyperparameters import hyperparameters_in
from metagrad.optim.rules import Rule

Examples = Literal["all", "support"]


class Reptile(MAML):
    r"""Reptile: learn an initialization near the adapted parameters of all tasks, without second derivatives.

    .. math::
        \nabla_\theta \, \mathrm{loss} := \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} (\theta - \phi_i), \qquad
        \phi_i = U_i^{\mathrm{steps}}(\theta)

    With ``torch.optim.SGD(learner.parameters(), lr=epsilon)`` the outer step is the batched version of the paper,
    :math:`\theta \leftarrow \theta + \frac{\epsilon}{n} \sum_i (\phi_i - \theta)`. For batches of one task it is the
    serial version. Any other optimizer gets the same gradient. The value of ``loss`` is the mean query loss after
    adaptation, as in MAML. No graph of a step is stored. Second derivatives raise an error, since this is not
    the gradient of any function.

    Protocol: Reptile trains on all examples of a task. In training with ``examples="all"``, the inner steps use the
    support and the query examples, so ``loss`` is a training loss. In ``eval()`` and under ``torch.no_grad()`` they
    use only the support examples, and the loss is the loss of MAML. Each inner step uses all examples. The paper
    samples mini-batches.

    Args:
        model: The model, as in :class:`MAML`.
        loss_fn: The loss function, as in :class:`MAML`.
        inner: The functional optimizer of the inner steps, without learned hyperparameters.
        steps: The number of inner steps. The paper uses 5 to 10.
        examples: The examples of the inner steps in training, ``"all"`` or ``"support"``. Use ``"support"`` for
            models with a fixed number of examples, such as graph networks.
        **arguments: Other arguments of :class:`MAML`, except ``adapt``, ``order`` and ``truncate``.

    Raises:
        ValueError: If ``examples`` is unknown, a hyperparameter of ``inner`` or the loss would be learned, or
            :class:`MAML` raises for another argument.
        TypeError: As in :class:`MAML`.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> learner = metagrad.Reptile(model, torch.nn.functional.mse_loss,
        ...                            inner=metagrad.optim.rules.sgd(lr=0.1), steps=5)
        >>> batch = metagrad.tasks.Sinusoid(shots=10, queries=10).sample(1)
        >>> everything = [torch.cat(pair, 1) for pair in zip(batch.support, batch.query)]
        >>> phi, theta = learner.adapt(everything).params["weight"][0], model.weight
        >>> learner(batch).loss.backward()
        >>> bool(torch.allclose(theta.grad, theta - phi))
        True

    References:
        Nichol, Achiam, Schulman, "On first-order meta-learning algorithms", 2018, algorithms 1 and 2.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        examples: Examples = "all",
        **arguments: Any,
    ) -> None:
        fixed = "all parameters are adapted, and steps are not differentiated. Use FOMAML or MAML."
        refuse_fixed("Reptile", arguments, **dict.fromkeys(("adapt", "order", "truncate"), fixed))
        check_choice("Reptile(..., examples)", examples, Examples)
        super().__init__(
            model, loss_fn, inner=inner, steps=steps, adapt=None, order=1, truncate=None, **arguments
        )
        self.examples: Examples = examples

    def _check(self) -> None:
        super()._check()
        if self.order != 1 or self.adapted is not None or self.truncate is not None:
            raise ValueError(
                f"Reptile(...): expected order 1, adapted None and truncate None, got {self.order!r}, "
                f"{self.adapted!r} and {self.truncate!r}. All parameters adapt, and steps are not differentiated."
            )
        beside = {"the loss": self.loss_fn, 'norm="per_step"': self.per_step_norms}
        what = [
            *(f"{path} of inner" for path, tensor in hyperparameters_in(self.inner) if tensor.requires_grad),
            *(name for name, part in beside.items() if isinstance(part, nn.Module) and _is_learned(part)),
        ]
        if what:
            raise ValueError(
                f"Reptile(...): {what[0]} would be learned, but the steps are not differentiated through. Give "
                "numbers, and modules without parameters that require grad, or use FOMAML or MAML."
            )

    def _inner_loop(self, steps: int, tasks: Tasks) -> InnerLoop:
        joins = self.examples == "all" and self.training and tasks.query_x is not None
        return DisplacementLoop(**vars(super()._inner_loop(steps, tasks)), joins=joins)


def _is_learned(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
