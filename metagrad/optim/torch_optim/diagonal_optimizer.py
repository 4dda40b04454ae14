"""The base class of ``torch.optim`` optimizers whose rule uses an estimate of a diagonal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from metagrad.core.checks import warn
from metagrad.optim.curvature import Curvature, Diagonal, KnownDiagonal, needs_curvature
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import TapeCurvature, WeightedLoss
from metagrad.optim.torch_optim.curvature_optimizer import (
    CurvatureOptimizer,
    generators_of,
    inverse_of,
    unknown_loss,
)
from metagrad.optim.torch_optim.move import working
from metagrad.optim.torch_optim.optimizer import Group, Work
from metagrad.sparse.tables.row_sparse import RowSparse


class DiagonalOptimizer(CurvatureOptimizer):
    """An optimizer whose rule has a ``request`` for an estimate of a diagonal.

    The estimate is made in the backward pass, so that of micro-batches one graph is alive at a time; the probes are
    those of the step, and the estimates of micro-batches add up to that of the whole batch.
    """

    def _observe(
        self, grads: Mapping[Tensor, Tensor], losses: Sequence[WeightedLoss], *, retain_graph: bool
    ) -> None:
        requests = self._requests()
        first = self.param_groups[0]
        generators = generators_of(first["seed"], first["step"])
        estimates = dict(self._estimates or {})
        for index, (request, named) in enumerate(requests.items()):
            params = {key: p for key, p in named.items() if p in grads}
            if not params:
                continue
            if request.matrix == "gauss_newton" and not losses:
                raise ValueError(unknown_loss(type(self).__name__))
            own = {key: grads[p] for key, p in params.items()}
            curvature = TapeCurvature(params, own, losses=losses, generators=generators)
            keep = retain_graph or index + 1 < len(requests)
            for key, estimate in curvature.diagonal(request, retain_graph=keep).items():
                p = params[key]
                estimates[p] = estimates[p] + estimate if p in estimates else estimate
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
        for key, p in work.params.items():
            if self._estimates and p in self._estimates:
                yield f"the curvature of {key!r}", self._estimates[p]

    def _curvature(self, group: Group, params: Params, grads: Params) -> Curvature | None:
        if not needs_curvature(self._rule(group), group["step"]):
            return KnownDiagonal({})
        if self._estimates is None:
            raise RuntimeError(
                f"{type(self).__name__}.step: there are gradients, but no curvature: loss.backward() outside of a "
                "closure gives none. Call opt.step(closure), where closure computes the loss, calls loss.backward() "
                "and returns it, or opt.backward(loss) in place of loss.backward()."
            )
        # A parameter that no loss depended on has no curvature, as it has no gradient.
        return KnownDiagonal(
            {
                key: working(self._estimates[p] if p in self._estimates else grads[key] * 0)
                for key, p in params.items()
            }
        )

    def _unscaled(self) -> bool:
        """Take the scale off the curvature, too."""
        if not super()._unscaled():
            return False
        if not self._estimates:
            return True
        scale = self._known_scale("curvature")
        self._estimates = {p: e * inverse_of(scale, p.device) for p, e in self._estimates.items()}
        if not all(bool(_values(e).isfinite().all()) for e in self._estimates.values()):
            warn(
                f"{type(self).__name__}.step: under the scale of GradScaler the curvature has overflowed, though the "
                "gradients have not, and the step is skipped. A smaller init_scale leaves room for products with the "
                "Hessian."
            )
            return False
        return True


def _values(estimate: Tensor) -> Tensor:
    return estimate.values if isinstance(estimate, RowSparse) else estimate
