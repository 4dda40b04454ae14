"""What makes a ``torch.optim.Optimizer`` of a rule that takes all parameters of a group for one vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from metagrad.curvature import Result
from metagrad.optim.rules.curvature import needs_curvature
from metagrad.optim.rules.probes import as_rows
from metagrad.optim.rules.rule import Params
from metagrad.optim.rules.second_order import endings
from metagrad.optim.rules.tape_curvature import WeightedLoss
from metagrad.optim.shells.closure_objective import (
    BackwardPass,
    ClosureObjective,
    GraphCurvature,
    KnownPart,
    RandomState,
    scalar_of,
    without_gradients,
)
from metagrad.optim.shells.curvature_optimizer import CurvatureOptimizer
from metagrad.optim.shells.gradients import leaves_behind, unknown_loss
from metagrad.optim.shells.move import working
from metagrad.optim.shells.optimizer import Group
from metagrad.optim.shells.state import joined, keep
from metagrad.sparse.rows.row_sparse import RowSparse


class NewtonOptimizer(CurvatureOptimizer):
    """An optimizer whose rule multiplies with the curvature of a loss, and looks at the loss again after a step.

    The closure is called once for gradient and curvature, with its graph, and then for the loss alone, as often as
    the rule asks: there ``backward`` does nothing, ``.grad`` stays, and random numbers (dropout) are those of the
    first call. Running statistics of BatchNorm move with every call. Losses of several backward passes add up.

    ``opt.step(closure, curvature=part)`` takes the curvature from another closure, of a part of the data.

    Each group is a block of its own: its step is that with the other groups where they are. One group gives the whole
    curvature.

    With a ``GradScaler`` there is no closure, hence nothing to adapt by: ``adapt=False`` (or ``line_search=None``)
    and ``opt.backward(scaler.scale(loss))``, ``scaler.step(opt)``; gradients and curvature are unscaled. If
    ``scaler.unscale_(opt)`` is called before, to clip gradients: ``opt.backward(loss, scaler=scaler)``.
    """

    elementwise = False
    adapted: ClassVar[str | None] = None
    """The hyper-parameter that the state of the rule has a factor of."""
    whole: ClassVar[str] = "newton"
    """What the direction of an undisturbed step is called."""

    @property
    def stats(self) -> dict[str, float | int | str]:
        """What the last step did in the first group; see :attr:`group_stats`. Empty before a step."""
        return self.group_stats[0] if self.group_stats else {}

    @property
    def group_stats(self) -> list[dict[str, float | int | str]]:
        """What the last step did, for each group that had gradients.

        ``steps`` and ``products`` of the inner solver (of L-BFGS: the gradients of the line search); its ``ending``,
        a name of :class:`metagrad.curvature.Result`, or ``NONE``; the ``ratio`` of the reductions of loss and model,
        NaN where it was not looked at; ``damping`` (``radius``, ``cubic``), that of the next step; the ``length`` of
        the step in units of its direction; and the ``direction``: ``newton``, ``natural_gradient`` or
        ``quasi_newton``, ``negative_curvature``, ``boundary``, or ``none`` where nothing moved.
        """
        return [self._described(group, state) for group, state in self.__dict__.get("_last", [])]

    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, curvature: Callable[[], Any] | None = None
    ) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss and its gradients, and returns the loss; it is called again for the loss alone.
            curvature: A closure of the same form for a part of the data, whose curvature is taken in place of that of
                all: products are what a step costs, and need fewer data than the gradient does.

        Returns:
            What the closure returned at its first call, without its graph.

        Raises:
            ValueError: ``curvature`` comes without ``closure``.
        """
        if curvature is not None and closure is None:
            raise ValueError(
                f"{type(self).__name__}.step(curvature=...): there is no closure. Call opt.step(closure, "
                "curvature=...), with closures of all the data and of a part of them."
            )
        self._closure, self._curvature_closure = closure, curvature
        try:
            return super().step(closure)
        finally:
            self._closure = self._curvature_closure = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and forget the curvature taken with them."""
        if not self.__dict__.get("_is_moving"):
            super().zero_grad(set_to_none)

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        self._random = RandomState(sorted({p.device for p in self._all_params()}, key=str))
        result = super()._evaluated(closure)
        if self._curvature_closure is not None and self._passes is not None:
            self._curved = self._passes_of(self._curvature_closure)
        return result

    def _passes_of(self, closure: Callable[[], Any]) -> list[BackwardPass] | None:
        """Return the backward passes of another closure, of which nothing else is kept."""
        kept, self._passes, self._is_moving = self._passes, None, True
        try:
            with without_gradients(self._all_params()):
                super()._evaluated(closure)
            return self._passes
        finally:
            self._passes, self._is_moving = kept, False

    def _backward_with_curvature(
        self,
        loss: Tensor,
        gradient: Tensor | None,
        retain_graph: bool | None,
        inputs: Tensor | Sequence[Tensor] | None,
        noted: Sequence[Any],
    ) -> None:
        self._value = scalar_of(loss, gradient).detach()
        super()._backward_with_curvature(loss, gradient, retain_graph, inputs, noted)

    def _observe(
        self, grads: Mapping[Tensor, Tensor], losses: Sequence[WeightedLoss], *, retain_graph: bool
    ) -> None:
        if self.notes_losses and not losses:
            raise ValueError(unknown_loss(type(self).__name__))
        parts = [KnownPart(loss, frozenset(leaves_behind(loss.loss.output))) for loss in losses]
        self._passes = [*(self._passes or []), BackwardPass(self._value, grads, parts)]

    def _forget(self) -> None:
        super()._forget()
        self._passes: list[BackwardPass] | None = None
        self._curved: list[BackwardPass] | None = None

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _curvature(self, group: Group, params: Params, grads: Params) -> Any:
        rule, name = self._rule(group), type(self).__name__
        if not needs_curvature(rule, group["step"]):
            return None
        if self._passes is None:
            raise RuntimeError(
                f"{name}.step: there are gradients, but no curvature: loss.backward() outside of a closure gives "
                "none. Call opt.step(closure), where closure computes the loss, calls loss.backward() and returns "
                "it, or, where nothing is adapted, opt.backward(loss) in place of loss.backward()."
            )
        if self._closure is not None:
            return ClosureObjective(
                params, self._passes, self._curved, self._closure, self._all_params(), self._random
            )
        option = next((o for o in ("adapt", "line_search") if group.get(o)), None)
        if option is not None:
            raise RuntimeError(
                f"{name}.step: {option}={group[option]!r} looks at the loss at other parameters, for which it is to "
                f"be computed again. Call opt.step(closure), or set {option}={False if option == 'adapt' else None}."
            )
        return GraphCurvature(params, self._passes, inverse_scale=self._inverse_scale())

    def _inverse_scale(self) -> float:
        if not hasattr(self, "found_inf"):
            return 1.0
        return 1 / float(self._known_scale("curvature"))

    def _move(self) -> None:
        """Move every group from where all of them are."""
        try:
            if hasattr(self, "found_inf") and float(self.found_inf) > 0:
                return
            self._is_moving = True
            moves = [self._moved_group(index) for index in range(len(self.param_groups))]
            self._last = [(group, state) for group, _, _, state in filter(None, moves)]
            for _, params, moved, state in filter(None, moves):
                keep(state._replace(report=None), {key: self.state[p] for key, p in params.items()})
                for key, p in params.items():
                    p.copy_(moved[key])
            for group in self.param_groups:
                group["step"] += 1
        finally:
            self._is_moving = False
            self._forget()

    def _moved_group(self, index: int) -> tuple[Group, Params, Params, Any] | None:
        group = self.param_groups[index]
        params = {key: p for key, p in self._named(index).items() if p.grad is not None}
        if not params:
            return None
        grads = {key: as_rows(p.grad) for key, p in params.items()}  # type: ignore[arg-type]
        for key, g in grads.items():
            if isinstance(g, RowSparse):
                self._check_rows(group, key)
        if hasattr(self, "found_inf") and self.grad_scale is not None:
            inverse = 1 / float(self.grad_scale)
            grads = {key: inverse * working(g) for key, g in grads.items()}
        rule, values = self._rule(group), {key: working(p) for key, p in params.items()}
        state, curvature = self._joined(rule, params, values), self._curvature(group, params, grads)
        moved, state = rule.update({key: working(g) for key, g in grads.items()}, state, values, curvature)
        return group, params, moved, state

    def _joined(self, rule: Any, params: Params, values: Params) -> Any:
        """Put the state of a rule together; a group that a parameter joins, or comes back to, begins anew."""
        states = {key: self.state.get(p, {}) for key, p in params.items()}
        steps = {state.get("step") for state in states.values()}
        return joined(rule, states) if len(steps) == 1 and None not in steps else rule.init(values)

    def _described(self, group: Group, state: Any) -> dict[str, float | int | str]:
        report, ending = state.report, endings(state.report)[0]
        named = {Result.NEGATIVE_CURVATURE.name: "negative_curvature", Result.BOUNDARY.name: "boundary"}
        length = float(report.length)
        found: dict[str, float | int | str] = {
            "steps": int(report.steps),
            "products": int(report.products),
            "ending": ending,
            "ratio": float(report.ratio),
            "length": length,
            "direction": "none" if length == 0 else named.get(ending, self.whole),
        }
        if self.adapted is not None:
            factor, added = float(getattr(state, "factor", 1.0)), float(getattr(state, "added", 0.0))
            found[self.adapted] = float(group[self.adapted]) * factor + added
        return found
