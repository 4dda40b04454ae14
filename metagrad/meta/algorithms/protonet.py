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
    r"""Prototypical network: each class is represented by the mean of its support embeddings.

    .. math::
        c_k = \frac{1}{|S_k|} \sum_{(x, y) \in S_k} f_\theta(x), \qquad
        \log p(y = k \mid x) = -\gamma \, \lVert f_\theta(x) - c_k \rVert^2 + \mathrm{const}

    With ``distance="cosine"`` the logits are :math:`\gamma \cos(f_\theta(x), c_k)`. The classes of a task may differ
    in their number of shots.

    Args:
        model: The embedding :math:`f_\theta`. It returns ``[examples, ...]``, and all axes except the first are
            features. All its parameters that require grad are meta-learned. It is called as in
            :class:`metagrad.MAML`.
        loss_fn: ``loss_fn(logits, target) -> scalar``, for the query examples of one task.
        distance: ``"euclidean"`` is the squared distance of the paper. The logits of ``"cosine"`` are bounded by
            ``scale``.
        scale: The factor :math:`\gamma`. It is meta-learned if it is a :class:`torch.nn.Parameter`.
        **arguments: ``task_chunk``, ``norm`` and ``nonfinite``, as in :class:`metagrad.MAML`.

    Raises:
        ValueError: If ``distance`` is unknown.

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
        # The prototype of a missing class is ones, so that the derivative of its norm is finite.
        return {"prototypes": (labels.mT @ features + (shots == 0)) / shots.clamp(min=1.0)}

    def logits(self, fitted: Params, features: Tensor) -> Tensor:
        """Return scaled negative squared distances to the prototypes, or cosines."""
        prototypes = fitted["prototypes"]
        if self.distance == "cosine":
            return self.scale * F.normalize(features, dim=-1) @ F.normalize(prototypes, dim=-1).mT
        squares = features.square().sum(-1, keepdim=True) + prototypes.square().sum(-1).unsqueeze(-2)
        return self.scale * (2 * features @ prototypes.mT - squares)
