"""Heads by ridge regression, in closed form, and by logistic regression, in a few Newton steps."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core._torch import linalg
from metagrad.core.checks import check_count, checked_positive
from metagrad.meta.algorithms.heads.base import HeadAlgorithm
from metagrad.meta.objective.task_loss import LossFn
from metagrad.optim.rules import Params


def ridge(x: Tensor, y: Tensor, penalty: float | Tensor) -> Tensor:
    r"""Return the weights :math:`\arg\min_W \lVert X W - Y \rVert^2 + \lambda \lVert W \rVert^2`.

    They are the solution of a system of as many equations as there are examples, or features if these are fewer,
    differentiable at every order.

    Args:
        x: Examples ``[tasks, n, features]``.
        y: Targets ``[tasks, n, ways]``.
        penalty: :math:`\lambda`, positive.

    Returns:
        ``[tasks, features, ways]``.
    """
    if x.shape[-2] < x.shape[-1]:
        return x.mT @ solved(x @ x.mT, penalty, y)
    return solved(x.mT @ x, penalty, x.mT @ y)


def solved(gram: Tensor, penalty: float | Tensor, b: Tensor) -> Tensor:
    r"""Return :math:`(G + \lambda I)^{-1} B`; NaN in one task is NaN there, for its loss to tell."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    return linalg.solve_ex(gram + penalty * eye, b)[0]


def with_ones(features: Tensor, labels: Tensor | None = None) -> Tensor:
    """Append the feature whose weight is the intercept; 1, and 0 for what has no label."""
    if labels is None:
        return F.pad(features, (0, 1), value=1.0)
    return torch.cat([features, labels.sum(-1, keepdim=True)], dim=-1)


class R2D2(HeadAlgorithm):
    r"""Ridge regression differentiable discriminator: a linear head in closed form.

    .. math::
        W_i = \arg\min_W \lVert X_i W - Y_i \rVert^2 + \lambda \lVert W \rVert^2
            = X_i^\top (X_i X_i^\top + \lambda I)^{-1} Y_i, \qquad
        \mathrm{logits} = \alpha \, f_\theta(x) W_i + \beta

    where the rows of :math:`X_i` are the support embeddings with a 1 appended, for an intercept, and those of
    :math:`Y_i` one-hot classes. :math:`\theta` and the three numbers are meta-learned; :math:`\lambda` and
    :math:`\alpha` stay positive, since their logarithms are the parameters (``log_penalty``, ``log_scale``).
    Gradients go through the solution of the system, whose size is that of the smaller of shots and features.

    Args:
        model: The embedding :math:`f_\theta`, as of :class:`metagrad.ProtoNet`.
        loss_fn: ``loss_fn(logits, target)`` for the query examples of one task, a scalar.
        penalty: The value of :math:`\lambda` to start from.
        scale: That of :math:`\alpha`; predictions lie about between 0 and 1, logits must reach further.
        bias: That of :math:`\beta`.
        **arguments: ``task_chunk``, ``norm`` and ``nonfinite`` as of :class:`metagrad.MAML`.

    Raises:
        ValueError: ``penalty`` or ``scale`` is not positive.

    Example:
        >>> r2d2 = metagrad.R2D2(torch.nn.Identity(), penalty=1e-9, scale=1.0)
        >>> fast = r2d2.adapt((torch.tensor([[[0.0], [1.0]]]), torch.tensor([[0, 1]])))
        >>> print((fast(torch.tensor([[[0.25]]])) * 100).round())
        tensor([[[75., 25.]]], grad_fn=<RoundBackward0>)

    References:
        Bertinetto, Henriques, Torr, Vedaldi, "Meta-learning with differentiable closed-form solvers", ICLR 2019,
        sections 3.1 and 3.2; the intercept is that of the authors' code.
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
            torch.tensor(math.log(checked_positive(f"{self._name}(..., penalty)", penalty)))
        )
        self.log_scale: nn.Parameter = nn.Parameter(
            torch.tensor(math.log(checked_positive(f"{self._name}(..., scale)", scale)))
        )
        self.bias: nn.Parameter = nn.Parameter(torch.tensor(float(bias)))

    def fit(self, features: Tensor, labels: Tensor) -> Params:
        """Return the weights ``[tasks, features + 1, ways]``."""
        return {"weight": ridge(with_ones(features, labels), labels, self.log_penalty.exp())}

    def logits(self, fitted: Params, features: Tensor) -> Tensor:
        """Return the calibrated predictions."""
        return self.log_scale.exp() * (with_ones(features) @ fitted["weight"]) + self.bias


class LRD2(R2D2):
    r"""Logistic regression differentiable discriminator: a linear head by a few Newton steps.

    The head of class k tells it from all others: it is logistic regression with labels :math:`y \in \{0, 1\}`,

    .. math::
        w \leftarrow X^\top (X X^\top + \lambda S^{-1})^{-1} \bigl(X w + S^{-1} (y - \mu)\bigr), \qquad
        \mu = \sigma(X w), \quad S = \mathrm{diag}(\mu (1 - \mu))

    from :math:`w = 0` on, which is Newton's method on the penalised likelihood, also called iteratively reweighted
    least squares. Gradients go through all steps.

    Args:
        model: The embedding, as of :class:`metagrad.ProtoNet`.
        loss_fn: ``loss_fn(logits, target)`` for the query examples of one task, a scalar.
        newton_steps: How many.
        penalty: As of :class:`metagrad.R2D2`.
        scale: As of :class:`metagrad.R2D2`; what it scales are logits already.
        bias: As of :class:`metagrad.R2D2`.
        **arguments: As of :class:`metagrad.R2D2`.

    Raises:
        ValueError: ``newton_steps`` is not positive, or as :class:`metagrad.R2D2`.

    Example:
        >>> lrd2 = metagrad.LRD2(torch.nn.Identity())
        >>> fast = lrd2.adapt((torch.tensor([[[-1.0], [1.0]]]), torch.tensor([[0, 1]])))
        >>> fast(torch.tensor([[[3.0], [-3.0]]])).argmax(-1)
        tensor([[1, 0]])

    References:
        Bertinetto et al., "Meta-learning with differentiable closed-form solvers", ICLR 2019, section 3.3, for two
        classes; here one against all others, for any number.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn = F.cross_entropy,
        *,
        newton_steps: int = 5,
        penalty: float = 1.0,
        scale: float = 1.0,
        bias: float = 0.0,
        **arguments: Any,
    ) -> None:
        super().__init__(model, loss_fn, penalty=penalty, scale=scale, bias=bias, **arguments)
        check_count("LRD2(..., newton_steps)", newton_steps)
        self.newton_steps = newton_steps

    def fit(self, features: Tensor, labels: Tensor) -> Params:
        """Return the weights ``[tasks, features + 1, ways]``."""
        x, penalty = with_ones(features, labels), self.log_penalty.exp()
        gram = (x @ x.mT).unsqueeze(1)  # of all classes
        y = labels.mT.unsqueeze(-1)
        dual = torch.zeros_like(y)  # w is x.mT @ dual
        for _ in range(self.newton_steps):
            value = gram @ dual
            mean = value.sigmoid()
            variance = mean * (1 - mean)
            # The paper's step multiplied by S from the left, which may have zeros.
            dual = solved(variance * gram, penalty, variance * value + y - mean)
        return {"weight": x.mT @ dual.squeeze(-1).mT}
