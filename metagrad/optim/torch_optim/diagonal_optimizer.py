"""The base class of ``torch.optim`` optimizers whose rule uses an estimate of a diagonal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.core.checks import warn
from metagrad.core.tree import widened
from metagrad.distributed.sums import everywhere, sums
from metagrad.optim.curvature import Curvature, Diagonal, KnownDiagonal, needs_curvature
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import TapeCurvature, WeightedLoss
from metagrad.optim.torch_optim.curvature_optimizer import (
    CurvatureOptimizer,
    inverse_of,
    unknown_loss,
)
from metagrad.optim.torch_optim.optimizer import Group, Work
from metagrad.sparse.tables.row_sparse import RowSparse

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DiagonalOptimizer(CurvatureOptimizer):
    """An optimizer whose rule has a ``request`` for an estimate of a diagonal.

    The estimate is made in the backward pass, so that of micro-batches one graph is alive at a time; the probes are
    those of the step, and the estimates of micro-batches add up to that of the whole batch.

    Of several processes, ``group``, each takes it of its own loss, and the step is by the mean, of the weights that
    :func:`metagrad.distributed.average_gradients` has given their gradients. With one seed all have the probes of
    one process; labels that are drawn are those of each.
    """

    def _observe(
        self, grads: Mapping[Tensor, Tensor], losses: Sequence[WeightedLoss], *, retain_graph: bool
    ) -> None:
        requests = self._requests()
        generators = {
            matrix: self._generators(draws_labels=matrix == "gauss_newton")
            for matrix in {request.matrix for request in requests}
        }
        estimates = dict(self._estimates or {})
        for index, (request, named) in enumerate(requests.items()):
            params = {key: p for key, p in named.items() if p in grads}
            if not params:
                continue
            if request.matrix == "gauss_newton" and not losses:
                raise ValueError(unknown_loss(type(self).__name__))
            own = {key: grads[p] for key, p in params.items()}
            curvature = TapeCurvature(params, own, losses=losses, generators=generators[request.matrix])
            keep = retain_graph or index + 1 < len(requests)
            for key, estimate in curvature.diagonal(request, retain_graph=keep).items():
                p = params[key]
                goes_on = p in estimates and p.grad is not None  # else its gradient was dropped
                estimates[p] = estimates[p] + estimate if goes_on else estimate
        self._estimates = estimates

    def _requests(self) -> dict[Diagonal, Params]:
        """Return the parameters by what their groups ask for: one estimate serves those that ask for the same."""
        requests: dict[Diagonal, Params] = defaultdict(dict)
        for index, group in enumerate(self.param_groups):
            rule = self._rule(group)
            if needs_curvature(rule, group["step"]):
                requests[rule.request].update(self._named(index))
        return requests

    def _forget(self) -> None:
        super()._forget()
        self._estimates: dict[Tensor, Tensor] | None = None

    def _observed(self, work: Work) -> Iterator[tuple[str, Tensor]]:
        yield from super()._observed(work)
        if self.group is not None and needs_curvature(self._rule(work.group), work.group["step"]):
            self._average(work.params, self.group)
        for key, p in work.params.items():
            if self._estimates and p in self._estimates:
                yield f"the curvature of {key!r}", self._estimates[p]

    def _average(self, params: Params, group: ProcessGroup) -> None:
        """Replace the estimates of this process by the means over all of them."""
        name, estimates, parts = type(self).__name__, dict(self._estimates or {}), {}
        for key, p in params.items():
            share = self._share_in(key, p)
            if share and self._estimates is None:
                raise self._without_curvature()
            parts[p] = torch.zeros_like(widened(p))
            if share and p in estimates:
                if isinstance(estimates[p], RowSparse):
                    raise ValueError(
                        f"{name}.step: the gradient of {key!r} is sparse, and the curvature of rows is not averaged "
                        "over processes. Use nn.Embedding(sparse=False), or SparseAdam for this table."
                    )
                parts[p] = widened(estimates[p]) * share
        self._estimates = {**estimates, **dict(zip(parts, sums(list(parts.values()), group), strict=True))}

    def _curvature(self, group: Group, params: Params, grads: Params) -> Curvature | None:
        if not needs_curvature(self._rule(group), group["step"]):
            return KnownDiagonal({})
        if self._estimates is None:
            raise self._without_curvature()
        # A parameter that no loss depended on has no curvature, as it has no gradient.
        return KnownDiagonal(
            {
                key: widened(self._estimates[p] if p in self._estimates else grads[key] * 0)
                for key, p in params.items()
            }
        )

    def _unscaled(self) -> bool:
        """Take the scale off the curvature, too."""
        if not super()._unscaled():
            return False
        if self._estimates:
            scale = self._known_scale("curvature")
            self._estimates = {p: e * inverse_of(scale, p.device) for p, e in self._estimates.items()}
        finite = is_finite([_values(estimate) for estimate in (self._estimates or {}).values()])
        if not (finite if self.group is None else everywhere(finite, self._device(), self.group)):
            warn(
                f"{type(self).__name__}.step: under the scale of GradScaler the curvature has overflowed, though the "
                "gradients have not, and the step is skipped. A smaller init_scale leaves room for products with the "
                "Hessian."
            )
            return False
        return True


def _values(estimate: Tensor) -> Tensor:
    return estimate.values if isinstance(estimate, RowSparse) else estimate
