"""Reptile: the meta-gradient is by how much the tasks moved the parameters, back."""

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
    r"""Learn parameters close to what all tasks come to, without differentiating through the inner steps.

    .. math::
        \nabla_\theta \, \mathrm{loss} := \frac{1}{|\mathcal T|} \sum_{i \in \mathcal T} (\theta - \phi_i), \qquad
        \phi_i = U_i^{\mathrm{steps}}(\theta)

    so that ``torch.optim.SGD(learner.parameters(), lr=epsilon)`` takes the steps
    :math:`\theta \leftarrow \theta + \frac{\epsilon}{n} \sum_i (\phi_i - \theta)` of the batched version, and of the
    serial one where batches have one task; any other optimizer is given the same gradient. The value of ``loss`` is
    the mean query loss after adaptation, as MAML's. No graph of a step is kept. A second derivative is refused: there
    is no function with that gradient.

    Protocol: a task is trained on all of its examples, so in training, with ``examples="all"``, the inner steps see
    support and query examples, and the loss that is returned is one of training. In ``eval()`` and under
    ``torch.no_grad()`` they see the support examples alone, and the loss is that of MAML. Each inner step takes all
    examples at once, where the paper draws minibatches of them.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        inner: As of :class:`MAML`, any rule; nothing of it is learned.
        steps: As of :class:`MAML`; the paper takes 5 to 10.
        examples: What the inner steps of training see: ``"all"`` examples, or those of ``"support"``.
        **arguments: As of :class:`MAML`, without ``adapt``, ``order`` and ``truncate``.

    Raises:
        ValueError: As :class:`MAML`; ``examples`` is something else; a hyper-parameter of ``inner`` or the loss
            is to be learned, which gets no gradient.
        TypeError: As :class:`MAML`.

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
