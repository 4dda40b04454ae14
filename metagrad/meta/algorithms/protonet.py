"""Prototypical networks."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core.checks import check_choice
from metagrad.core.tree import LossFn, Params
from metagrad.meta.algorithms.heads import HeadAlgorithm

Distance = Literal["euclidean", "cosine"]


class ProtoNet(HeadAlgorithm):
    r"""Prototypical network: a class is the mean of its support embeddings.

    .. math::
        c_k = \frac{1}{|S_k|} \sum_{(x, y) \in S_k} f_\theta(x), \qquad
        \log p(y = k \mid x) = -\gamma \, \lVert f_\theta(x) - c_k \rVert^2 + \mathrm{const}

    or, with ``distance="cosine"``, :math:`\gamma \cos(f_\theta(x), c_k)`. The classes of a task may have unequal
    numbers of shots.

    Args:
        model: The embedding :math:`f_\theta`: returns ``[examples, ...]``, of which all axes but the first are
            features; all its parameters that require grad are meta-learned. Called as :class:`metagrad.MAML` does.
        loss_fn: ``loss_fn(logits, target)`` for the query examples of one task, a scalar.
        distance: ``"euclidean"``, squared, as in the paper, or ``"cosine"``, whose logits lie within ``scale``.
        scale: :math:`\gamma`; meta-learned if it is a :class:`torch.nn.Parameter`.
        **arguments: ``task_chunk``, ``norm`` and ``nonfinite`` as of :class:`metagrad.MAML`.

    Raises:
        ValueError: ``distance`` is none of these.

    Example:
        >>> protonet = metagrad.ProtoNet(torch.nn.Identity())
        >>> fast = protonet.adapt((torch.tensor([[[0.0, 0.0], [2.0, 0.0], [4.0, 4.0]]]), torch.tensor([[0, 0, 1]])))
        >>> fast(torch.tensor([[[1.0, 1.0]]]))
        tensor([[[ -1., -18.]]])

    References:
        Snell, Swersky, Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017, section 2.2. The cosine
        with a scale: Gidaris, Komodakis, "Dynamic few-shot visual learning without forgetting", CVPR 2018, eq. 3.
    """

    scale: float | nn.Parameter

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn = F.cross_entropy,
        *,
        distance: Distance = "euclidean",
        scale: float | nn.Parameter = 1.0,
        **arguments: Any,
    ) -> None:
        super().__init__(model, loss_fn, **arguments)
        self.distance: Distance = check_choice("ProtoNet(..., distance)", distance, Distance)
        self.scale = scale

    def fit(self, features: Tensor, labels: Tensor) -> Params:
        """Return the prototypes ``[tasks, ways, features]``."""
        shots = labels.sum(1).unsqueeze(-1)
        # Of a class that only other tasks have: ones, whose norm has derivatives.
        return {"prototypes": (labels.mT @ features + (shots == 0)) / shots.clamp(min=1.0)}

    def logits(self, fitted: Params, features: Tensor) -> Tensor:
        """Return scaled negative squared distances to the prototypes, or cosines."""
        prototypes = fitted["prototypes"]
        if self.distance == "cosine":
            return self.scale * F.normalize(features, dim=-1) @ F.normalize(prototypes, dim=-1).mT
        squares = features.square().sum(-1, keepdim=True) + prototypes.square().sum(-1).unsqueeze(-2)
        return self.scale * (2 * features @ prototypes.mT - squares)
