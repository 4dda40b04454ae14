"""Proto-MAML: inner steps that start from a prototypical network."""

from __future__ import annotations

from typing import Any

from torch import nn

from metagrad.meta.inner.prototypes import Prototypes
from metagrad.meta.maml import MAML
from metagrad.meta.objective.task_loss import LossFn
from metagrad.optim.rules import Rule


class ProtoMAML(MAML):
    r"""MAML whose head starts, in each task, as the one that makes the model a prototypical network.

    .. math::
        w_k = 2 c_k, \quad b_k = -\lVert c_k \rVert^2, \qquad
        c_k = \frac{1}{|S_k|} \sum_{x \in S_k} f_\theta(x)

    for the support examples :math:`S_k` of class k and the embedding :math:`f_\theta`, which is what the head is
    given. All parameters are adapted from there. With ``steps=0`` it is the prototypical network. The meta-gradient
    goes through the prototypes into the body, as in the paper, with ``order=1`` too (some implementations detach
    them); the head's own parameters have no part in it. Tasks have as many classes as the head has outputs, and
    classes may differ in size.

    Args:
        model: A classifier that ends in a linear layer.
        loss_fn: As of :class:`MAML`; cross-entropy, say.
        inner: As of :class:`MAML`.
        steps: As of :class:`MAML`.
        head: The name of that layer, an ``nn.Linear`` with bias.
        **arguments: As of :class:`MAML`, without ``start``.

    Raises:
        ValueError: As :class:`MAML`; there is no such layer; or when called, a class of a task has no support
            example.
        TypeError: As :class:`MAML`; or the layer is no ``nn.Linear`` with bias.

    Example:
        >>> model = metagrad.models.Conv4(5, hidden=8)
        >>> learner = metagrad.ProtoMAML(model, torch.nn.functional.cross_entropy,
        ...                              inner=metagrad.optim.rules.sgd(lr=0.01), steps=2)
        >>> x, y = torch.randn(2, 5, 1, 28, 28), torch.arange(5).repeat(2, 1)
        >>> learner(((x, y), (x, y))).loss.backward()
        >>> model.blocks[0][0].weight.grad is None, model.head.weight.grad is None
        (False, True)

    References:
        Triantafillou, Zhu, Dumoulin, Lamblin, Evci, Xu, Goroshin, Gelada, Swersky, Manzagol, Larochelle,
        "Meta-Dataset: A dataset of datasets for learning to learn from few examples", ICLR 2020, section 3.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        inner: Rule,
        steps: int,
        head: str = "head",
        **arguments: Any,
    ) -> None:
        start = Prototypes(head)
        start.layer(model)
        super().__init__(model, loss_fn, inner=inner, steps=steps, start=start, **arguments)
