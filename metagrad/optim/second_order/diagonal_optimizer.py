"""The base class of AdaHessian and Sophia, which estimate the diagonal of a curvature matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.core.capture import entropy
from metagrad.core.checks import warn
from metagrad.core.tree import widened
from metagrad.curvature.estimators.probes import Distribution, Generators, fill
from metagrad.optim.second_order.curvature_optimizer import (
    BackwardPass,
    CurvatureOptimizer,
)
from metagrad.optim.torch_optim.optimizer import Group, ParamsWithGrad
from metagrad.optim.torch_optim.sparse_gradients import as_rows
from metagrad.optim.torch_optim.state import PendingUpdate
from metagrad.sparse.tables.row_sparse import RowSparse


class DiagonalOptimizer(CurvatureOptimizer):
    """An optimizer that estimates the diagonal of a curvature matrix and divides by it.

    The estimate is computed during ``backward``. With gradient accumulation, only the graph of the current
    micro-batch is in memory. All micro-batches of a step use the same probes, so their estimates sum to the estimate
    of the batch.
    """

    counts = ("samples",)
    distribution: ClassVar[Distribution] = "rademacher"
    """The distribution of the probes."""
    _estimates: dict[Tensor, Tensor] | None = None
    """Estimates since the last step. None before a backward pass."""

    def _diagonal(
        self, samples: int, params: Sequence[Tensor], graph: BackwardPass, generators: Generators
    ) -> list[Tensor]:
        r"""Estimate the diagonal of the Hessian by Hutchinson's probes, :math:`z \odot H z` with E[z z^T] = I.

        Args:
            samples: Number of probes, over which the estimate is averaged.
            params: The parameters.
            graph: The backward pass, with the graphs of its gradients.
            generators: Draw the probes.

        References:
            Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Applied Numerical Mathematics 57,
            2007.
        """
        grads = [graph.grads[p] for p in params]
        totals = [torch.zeros_like(widened(p)) for p in params]
        for index in range(samples):
            probes = [fill(g.new_empty(g.shape), self.distribution, generators[g.device]) for g in grads]
            keep = graph.retain_graph or index + 1 < samples
            found = graph_vjp(grads, params, probes, retain_graph=keep)
            for total, z, product in zip(totals, probes, found, strict=True):
                if product is not None:
                    total += widened(z) * widened(product) / samples
        return totals

    def _moved(
        self, group: Group, p: Tensor, g: Tensor, diagonal: Tensor | None, state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new value and state of a parameter. ``diagonal`` is None in steps without an estimate."""
        raise NotImplementedError

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        first, group = self.param_groups[0], self.param_groups[index]
        if group["samples"] != first["samples"]:
            raise ValueError(
                f"{type(self).__name__}(params): one estimate is of all groups, so samples must be the same in all, "
                f"got {first['samples']} and {group['samples']}."
            )

    def _observe(self, graph: BackwardPass) -> None:
        due = [p for group in self.param_groups if self._is_due(group) for p in group["params"]]
        params, estimates = [p for p in due if p in graph.grads], dict(self._estimates or {})
        for index in range(len(self.param_groups)):
            for key, p in self._named(index).items():
                if isinstance(as_rows(graph.grads.get(p, p)), RowSparse):
                    raise self._without_rows(key)
        first = self.param_groups[0]
        generators = Generators(entropy(first["seed"], first["step"]))
        found = self._diagonal(first["samples"], params, graph, generators) if params else []
        for p, estimate in zip(params, found, strict=True):
            goes_on = p in estimates and p.grad is not None  # otherwise its gradient was dropped
            estimates[p] = estimates[p] + estimate if goes_on else estimate
        self._estimates = estimates

    def _forget(self) -> None:
        super()._forget()
        self._estimates = None

    def _observed(self, work: ParamsWithGrad) -> Iterator[tuple[str, Tensor]]:
        yield from super()._observed(work)
        for key, p in work.params.items():
            if self._estimates and p in self._estimates:
                yield f"the curvature of {key!r}", self._estimates[p]

    def _unscaled(self) -> bool:
        if not super()._unscaled():
            return False
        if self._estimates:
            scale = self._inverse_scale()
            self._estimates = {p: estimate * scale for p, estimate in self._estimates.items()}
            if not is_finite(list(self._estimates.values())):
                warn(
                    f"{type(self).__name__}.step: under the scale of GradScaler the curvature has overflowed, though "
                    "the gradients have not, and the step is skipped. A smaller init_scale leaves room for products "
                    "with the Hessian."
                )
                return False
        return True

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        group, params, grads = work
        self._rule(group)
        is_due, sign = self._is_due(group), -1 if group["maximize"] else 1
        if is_due and self._estimates is None:
            raise self._without_curvature()
        for key, p in params.items():
            w, g = widened(p), sign * widened(grads[key])
            diagonal = None
            if is_due:  # a parameter that no loss depended on has no curvature, as it has no gradient
                diagonal = sign * (self._estimates or {}).get(p, torch.zeros_like(w))
            state = self.state.get(p, {})
            new, slots = self._moved(group, w, g, diagonal, state)
            yield PendingUpdate({key: p}, {key: new}, {key: {"step": state.get("step", 0) + 1, **slots}})
