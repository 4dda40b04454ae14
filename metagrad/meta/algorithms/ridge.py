"""R2D2: a linear head by ridge regression in closed form."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core._torch import linalg
from metagrad.core.checks import check_positive
from metagrad.core.tree import LossFn, Params
from metagrad.meta.algorithms.heads import HeadAlgorithm


def ridge(x: Tensor, y: Tensor, penalty: float | Tensor) -> Tensor:
    r"""Return the weights :math:`\arg\min_W \lVert X W - Y \rVert^2 + \lambda \lVert W \rVert^2`.

    The size of the linear system is the number of examples or features, whichever is smaller. The result is
    differentiable at every order.

    Args:
        x: Examples ``[tasks, n, features]``.
        y: Targets ``[tasks, n, ways]``.
        penalty: The positive number :math:`\lambda`.

    Returns:
        Weights ``[tasks, features, ways]``.
    """
    if x.shape[-2] < x.shape[-1]:
        return x.mT @ solved(x @ x.mT, penalty, y)
    return solved(x.mT @ x, penalty, x.mT @ y)


def solved(gram: Tensor, penalty: float | Tensor, b: Tensor) -> Tensor:
    r"""Return :math:`(G + \lambda I)^{-1} B`. NaN in one task does not affect other tasks."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return linalg.solve_ex(gram + penalty * eye, b)[0]


def with_ones(features: Tensor, labels: Tensor | None = None) -> Tensor:
    """Append a constant feature for the intercept. The feature is 1, or 0 for examples without a label."""
    if labels is None:
        return F.pad(features, (0, 1), value=1.0)
    return torch.cat([features, labels.sum(-1, keepdim=True)], dim=-1)


class R2D2(HeadAlgorithm):
    r"""Ridge regression differentiable discriminator: a linear head in closed form.

    .. math::
        W_i = \arg\min_W \lVert X_i W - Y_i \rVert^2 + \lambda \lVert W \rVert^2
            = X_i^\top (X_i X_i^\top + \lambda I)^{-1} Y_i, \qquad
        \mathrm{logits} = \alpha \, f_\theta(x) W_i + \beta

    The rows of :math:`X_i` are the support embeddings with a 1 appended for the intercept. The rows of :math:`Y_i`
    are one-hot classes. :math:`\theta`, :math:`\lambda`, :math:`\alpha` and :math:`\beta` are meta-learned.
    :math:`\lambda` and :math:`\alpha` stay positive, since the parameters are their logarithms (``log_penalty``,
    ``log_scale``). The size of the linear system is the number of shots or features, whichever is smaller.

    Args:
        model: The embedding :math:`f_\theta`, as in :class:`metagrad.ProtoNet`.
        loss_fn: ``loss_fn(logits, target) -> scalar``, for the query examples of one task.
        penalty: The initial value of :math:`\lambda`.
        scale: The initial value of :math:`\alpha`. Predictions are between about 0 and 1, and logits need a larger
            range.
        bias: The initial value of :math:`\beta`.
        **arguments: ``task_chunk``, ``norm`` and ``nonfinite``, as in :class:`metagrad.MAML`.

    Raises:
        ValueError: If ``penalty`` or ``scale`` is not positive.

    Example:
        >>> r2d2 = metagrad.R2D2(torch.nn.Identity(), penalty=1e-9, scale=1.0)
        >>> fast = r2d2.adapt((torch.tensor([[[0.0], [1.0]]]), torch.tensor([[0, 1]])))
        >>> print((fast(torch.tensor([[[0.25]]])) * 100).round())
        tensor([[[75., 25.]]], grad_fn=<RoundBackward0>)

    References:
        Bertinetto, Henriques, Torr, Vedaldi, "Meta-learning with differentiable closed-form solvers", ICLR 2019,
        sections 3.1 and 3.2. The intercept is in the code of the authors.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn = F.cross_entropy,
        *,
        penalty: float = 1.0,
        scale: float = 10.0,
        bias: float = 0.0,
        **arguments: Any,
    ) -> None:
        super().__init__(model, loss_fn, **arguments)
        self.log_penalty: nn.Parameter = nn.Parameter(
            torch.tensor(math.log(check_positive(f"{self._name}(..., penalty)", penalty)))
        )
        self.log_scale: nn.Parameter = nn.Parameter(
            torch.tensor(math.log(check_positive(f"{self._name}(..., scale)", scale)))
        )
        self.bias: nn.Parameter = nn.Parameter(torch.tensor(float(bias)))

    def fit(self, features: Tensor, labels: Tensor) -> Params:
        """Return the weights ``[tasks, features + 1, ways]``."""
        return {"weight": ridge(with_ones(features, labels), labels, self.log_penalty.exp())}

    def logits(self, fitted: Params, features: Tensor) -> Tensor:
        """Return the calibrated predictions."""
        return self.log_scale.exp() * (with_ones(features) @ fitted["weight"]) + self.bias
