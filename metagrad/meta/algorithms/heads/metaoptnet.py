"""MetaOptNet: a support vector machine or ridge regression as head."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core.checks import checked_positive
from metagrad.meta.algorithms.heads.base import HeadAlgorithm
from metagrad.meta.algorithms.heads.crammer_singer import Dual, solve
from metagrad.meta.algorithms.heads.ridge import ridge
from metagrad.meta.objective.task_loss import LossFn
from metagrad.optim.rules import Params

Head = Literal["svm", "ridge"]


class MetaOptNet(HeadAlgorithm):
    r"""MetaOptNet: a linear head that solves a convex program, by default a multi-class support vector machine.

    The dual of Crammer and Singer's machine has a solution :math:`\alpha` for the support examples
    :math:`x_n` of classes :math:`y_n`,

    .. math::
        \alpha = \arg\min_\alpha \; \tfrac12 \sum_k \lVert w_k \rVert^2 + \tfrac{\delta}{2} \lVert \alpha \rVert^2
            - \sum_n \alpha_{n y_n}
        \quad \text{s.t.} \quad \alpha_{nk} \le C \, [y_n = k], \quad \sum_k \alpha_{nk} = 0, \qquad
        w_k = \sum_n \alpha_{nk} f_\theta(x_n)

    and the logits are :math:`\gamma \, w_k^\top f_\theta(x)`. The program of each task is solved in float64 on the
    CPU by Clarabel (``pip install 'metagrad[qp]'``), and differentiated by its optimality conditions, at every
    order where strict complementarity holds; where it does not, that is an error.

    Args:
        model: The embedding :math:`f_\theta`, as of :class:`metagrad.ProtoNet`.
        loss_fn: ``loss_fn(logits, target)`` for the query examples of one task, a scalar.
        head: ``"svm"``, or ``"ridge"``, which needs no solver:
            :math:`W = X^\top (X X^\top + \lambda I)^{-1} Y` with one-hot :math:`Y`.
        C: The bound of the support vector machine.
        damping: :math:`\delta`. 1 is that of the authors' code; 0 is the paper's program, which needs support
            embeddings that are linearly independent.
        penalty: :math:`\lambda` of ridge regression.
        scale: What :math:`\gamma`, which is meta-learned, starts from.
        **arguments: ``task_chunk``, ``norm`` and ``nonfinite`` as of :class:`metagrad.MAML`.

    Raises:
        ValueError: ``head`` is none of these, ``C`` or ``penalty`` is not positive, or ``damping`` is negative.

    Example:
        >>> metaoptnet = metagrad.MetaOptNet(torch.nn.Identity(), C=10.0, damping=0.0)
        >>> fast = metaoptnet.adapt((torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.tensor([[0, 1]])))
        >>> print(fast(torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])).round(decimals=4).tolist())
        [[[0.5, -0.5], [0.0, 0.0]]]

    References:
        Lee, Maji, Ravichandran, Soatto, "Meta-learning with differentiable convex optimization", CVPR 2019,
        equations 8 to 12; Crammer, Singer, "On the algorithmic implementation of multiclass kernel-based vector
        machines", JMLR 2001; Goulart, Chen, "Clarabel: an interior-point solver for conic programs with quadratic
        objectives", 2024.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn = F.cross_entropy,
        *,
        head: Head = "svm",
        C: float = 0.1,
        damping: float = 1.0,
        penalty: float = 50.0,
        scale: float = 1.0,
        **arguments: Any,
    ) -> None:
        super().__init__(model, loss_fn, **arguments)
        if head not in get_args(Head):
            raise ValueError(f'MetaOptNet(..., head): expected "svm" or "ridge", got {head!r}.')
        self.head: Head = head
        self.C = checked_positive("MetaOptNet(..., C)", C)
        self.penalty: float = checked_positive("MetaOptNet(..., penalty)", penalty)
        if not 0 <= damping < math.inf:
            raise ValueError(f"MetaOptNet(..., damping): expected a number of at least 0, got {damping!r}.")
        self.damping = damping
        self.scale: nn.Parameter = nn.Parameter(torch.tensor(float(scale)))

    def fit(self, features: Tensor, labels: Tensor) -> Params:
        """Return the weights ``[tasks, features, ways]``."""
        if self.head == "ridge":
            return {"weight": ridge(features, labels, self.penalty)}
        x = features.double()
        damping = self.damping * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        alpha = solve("MetaOptNet(batch)", Dual(x @ x.mT + damping, labels.double(), self.C))
        return {"weight": (x.mT @ alpha).to(features.dtype)}

    def logits(self, fitted: Params, features: Tensor) -> Tensor:
        """Return the scaled scores of the classes."""
        return self.scale * (features @ fitted["weight"])
