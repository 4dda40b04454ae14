"""An operator whose products are averaged over the ranks of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.checks import check_type
from metagrad.curvature.operators.operator import Operator, OperatorWrapper

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Averaged(OperatorWrapper):
    r"""The mean of the operators of all ranks, :math:`\frac{1}{W} \sum_w A_w`. A product costs one all-reduce.

    Each rank makes its operator from its own data, at the same parameters. All ranks make the same products in the
    same order, so estimators need equal generators. Products are not differentiable.

    Args:
        operator: The operator of this rank.
        group: The process group. None is the default group.

    Raises:
        TypeError: ``operator`` is not an :class:`~metagrad.curvature.Operator`.
        ValueError: In a product, the ranks multiply different vectors.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with metagrad.curvature.hessian((w**3).sum(), {"w": w}) as H:
        ...     metagrad.curvature.Averaged(H) @ torch.ones(2)  # one process: nothing changes
        tensor([ 6., 12.])
    """

    def __init__(self, operator: Operator, group: ProcessGroup | None = None) -> None:
        super().__init__(check_type("Averaged(operator, group)", operator, Operator))
        self.group = group

    def _products(self, vectors: Tensor) -> Tensor:
        products = self.operator.multiply(vectors).detach()
        if self.group is None and not dist.is_initialized():
            return products
        weights = torch.arange(1, self.space.size + 1, device=self.device).to(self.dtype).cos()
        mark = vectors.detach() @ weights
        message = torch.cat([products, mark.unsqueeze(1)], 1)
        cast("Any", dist).all_reduce(message, group=self.group)
        message = message / dist.get_world_size(self.group)
        bound = torch.finfo(self.dtype).eps ** 0.5 * linalg.vector_norm(vectors.detach(), dim=1)
        if bool(((message[:, -1] - mark).abs() > bound).any()):
            raise ValueError(
                "Averaged(operator, group): the ranks multiply different vectors. Give estimators generators with "
                "the same seed on every rank, such as generator=torch.Generator().manual_seed(0)."
            )
        return message[:, :-1]
