"""An operator whose products are averaged over the ranks of a group."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from metagrad.core.checks import check_type
from metagrad.curvature.operators.operator import DerivedOperator, Operator
from metagrad.distributed.exchange import joined, refuse_differences, sums_over


class Averaged(DerivedOperator):
    r"""The mean of the operators of all ranks, :math:`\frac{1}{W} \sum_w A_w`.

    A product costs one all-reduce. A second all-reduce, of three numbers, checks that all ranks multiply the same
    vector. Each rank makes its operator from its own data, at the same parameters. All ranks make the same products
    in the same order, so estimators need generators in the same state on all ranks. Products are not differentiable.

    Args:
        operator: The operator of this rank.
        group: The process group. None means the default group.

    Raises:
        TypeError: ``operator`` is not an :class:`~metagrad.curvature.Operator`.
        ValueError: In a product, the ranks multiply different vectors.

    Example:
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> with metagrad.curvature.hessian((w**3).sum(), {"w": w}) as H:
        ...     metagrad.curvature.Averaged(H) @ torch.ones(2)  # one process: nothing changes
        tensor([ 6., 12.])
    """

    def __init__(self, operator: Operator, group: dist.ProcessGroup | None = None) -> None:
        check_type("Averaged(operator, group)", operator, Operator)
        super().__init__(operator.space, self._mean, operator)
        self.group = group

    def _mean(self, vectors: Tensor) -> Tensor:
        products = self.parts[0].multiply(vectors).detach()
        if (group := joined(self.group)) is None:
            return products
        what = "Averaged(operator, group): vectors, for which estimators need generators with the same seed"
        refuse_differences(group, what, [vectors])
        return sums_over(group, [products], [products])[0] / group.size()
