"""L-BFGS as an optimizer of torch's kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

import metagrad.optim.rules as rules
from metagrad.optim.rules.probes import torchs_own
from metagrad.optim.rules.row_stack import RowStack
from metagrad.optim.rules.rule import Params
from metagrad.optim.shells.closure_objective import BackwardPass, ClosureObjective, scalar_of
from metagrad.optim.shells.gradients import leaves_behind
from metagrad.optim.shells.newton_optimizer import NewtonOptimizer
from metagrad.optim.shells.optimizer import Group, ParameterGroups


class LBFGS(NewtonOptimizer):
    r"""Optimize by L-BFGS, up to ``max_iter`` iterations a step, as ``torch.optim.LBFGS`` does.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    see :func:`~metagrad.optim.rules.lbfgs.lbfgs`, whose steps the iterations are. ``step(closure)`` calls the closure
    for loss and gradient where it begins, and then for both at other parameters, and iterates until the largest
    element of the gradient is at most ``tolerance_grad``, neither the loss nor any parameter changes by more than
    ``tolerance_change``, or ``max_iter`` iterations or ``max_eval`` calls are made. It returns the loss at its
    beginning, and leaves the gradient there in ``.grad``. Without a closure, after ``loss.backward()``, a step is one
    iteration, with gradients that may be clipped or accumulated.

    Names and defaults are torch's, but for the line search, which is on; the length that it begins with is ``lr``.
    Groups may differ in step size and weight decay.

    Args:
        params: Parameters, with names or without, or groups of them, which make one vector.
        lr: The factor :math:`\eta` of every direction.
        weight_decay: Of the loss with the penalty of half of it times the squared norm of the parameters.
        max_iter: The most iterations of a step.
        max_eval: The most calls of the closure in a step; None is 5/4 of ``max_iter``, but at least 25, which is
            enough for a line search.
        tolerance_grad: A step ends where no element of the gradient, weight decay included, is larger.
        tolerance_change: A step ends where neither loss nor parameters change by more.
        history_size: How many pairs are kept, in twice as many vectors of the size of the parameters. They are made
            as iterations are.
        line_search_fn: ``"strong_wolfe"`` looks for a length, and needs a closure; None takes ``lr``.
        maximize: Climb.
        nonfinite: Where the loss or the gradient is NaN or infinite where a step begins, parameters and state stay as
            they were, and there is an error (``"raise"``) or no step (``"skip"``).

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.

    Example:
        >>> import torch
        >>> from metagrad.optim.shells.lbfgs import LBFGS
        >>> w = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
        >>> opt = LBFGS([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(3):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.ones_like(w), atol=1e-4)
        True

    References:
        Liu, Nocedal, Mathematical Programming 45, 1989.
    """

    make_rule = staticmethod(rules.lbfgs)
    differentiates_twice = False
    # The product of an infinite or NaN element is neither a number nor 0, and every pair is multiplied with itself.
    implied = ("moves", "changes")
    whole = "quasi_newton"
    _counts: Mapping[str, int] = {}
    shell_options = NewtonOptimizer.shell_options | {"max_iter", "max_eval", "tolerance_grad"}

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        weight_decay: float | Tensor = 0.0,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: Literal["strong_wolfe"] | None = "strong_wolfe",
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "max_iter": max_iter,
                "max_eval": max_eval,
                "tolerance_grad": tolerance_grad,
                "tolerance_change": tolerance_change,
                "history_size": history_size,
                "line_search_fn": line_search_fn,
                "maximize": maximize,
                "nonfinite": nonfinite,
            },
        )

    def _forget(self) -> None:
        super()._forget()
        self._leaves: list[Tensor] = []
        self._returns_loss = False
        # Buffers that are kept from step to step, and made anew where an optimizer is copied or loaded.
        self._stacks: tuple[RowStack, RowStack] = self.__dict__.get("_stacks", (RowStack(), RowStack()))

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        name, group = type(self).__name__, self.param_groups[index]
        for option in ("max_iter", "max_eval"):
            value = group[option]
            if (option, value) != ("max_eval", None) and (not isinstance(value, int) or value < 1):
                raise ValueError(
                    f"{name}(params): {option} must be a whole number of at least 1, got {value!r}."
                )
        if not group["tolerance_grad"] >= 0:
            raise ValueError(
                f"{name}(params): tolerance_grad must be at least 0, got {group['tolerance_grad']!r}."
            )

    @property
    def stats(self) -> dict[str, float | int | str]:
        """What the last step did; by a closure also its ``iterations``, and ``evaluations`` of the closure."""
        found = super().stats
        return {**found, **self._counts} if found else {}

    def _is_curvature_due(self) -> bool:
        return self.__dict__.get("_closure") is not None or super()._is_curvature_due()

    def _curvature(self, group: Group, params: Params, grads: Params) -> Any:
        if self._closure is None or self._passes is None:
            return super()._curvature(group, params, grads)
        objective = self._objective(params, torchs_own)
        return _Evaluations(objective, objective.called if self._returns_loss else objective.gradient)

    def _evaluated(self, closure: Callable[..., Any]) -> Any:
        result = super()._evaluated(closure)
        # Hooks that see what is accumulated see it once a step.
        has_hooks = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._all_params())
        self._returns_loss = _is_the_loss(result, self._passes) and not (has_hooks or self._asked_for_graph)
        return result

    def _backward_with_curvature(
        self,
        loss: Tensor,
        gradient: Tensor | None,
        retain_graph: bool | None,
        inputs: Tensor | Sequence[Tensor] | None,
    ) -> None:
        """Accumulate gradients as torch does: there is no curvature to be taken of the graph."""
        self._leaves = [*self._leaves, *leaves_behind(loss)]
        loss.backward(gradient, retain_graph, inputs=inputs)
        self._losses = [*self._losses, loss.detach()]
        own = BackwardPass(scalar_of(loss, gradient).detach(), {}, ())
        self._passes = [*(self._passes or []), own]

    def _all_params(self) -> list[Tensor]:
        return list(dict.fromkeys([*super()._all_params(), *self._leaves]))

    def _updated(
        self, rule: rules.LBFGS, grads: Params, state: rules.LBFGSState, values: Params, curvature: Any
    ) -> tuple[Params, rules.LBFGSState]:
        """Iterate until nothing changes, or there have been enough iterations or evaluations."""
        if not isinstance(curvature, _Evaluations):
            return rule.update(grads, state, values, curvature)
        group, iterations = self.param_groups[0], 0
        most = group["max_eval"] or max(group["max_iter"] * 5 // 4, 25)
        last = None  # that moved
        while iterations < group["max_iter"] and curvature.count < most:
            problem = rule.problem(grads, values, curvature, None, state.step)
            if _largest(problem.g) <= group["tolerance_grad"]:
                break
            before, left = curvature.value, most - curvature.count
            iteration = rule.iterate(problem, state, curvature, max_eval=left, stacks=self._stacks)
            iterations, state = iterations + 1, iteration.state
            place = problem.space.place + iteration.move
            change, values = _largest(place - problem.space.place), problem.space.tensors(place)
            last = iteration if change or last is None else last
            if change == 0 or iterations == group["max_iter"]:
                break
            grads = curvature.at(values, iteration.found.evaluation[0])
            if change <= group["tolerance_change"]:
                break
            if abs(float(curvature.value - before)) < group["tolerance_change"]:
                break
        self._counts = {"iterations": iterations, "evaluations": curvature.count}
        return values, state if last is None else state._replace(report=last.report())


class _Evaluations:
    """A closure's loss at the place where an iteration begins, and what is known of it elsewhere."""

    def __init__(
        self, objective: ClosureObjective, gradient: Callable[[Params], tuple[Tensor, Params]]
    ) -> None:
        self._gradient = gradient
        self._found: list[tuple[Tensor, Params]] = []
        self.value = objective.value
        self.evaluate = objective.evaluate
        self.count = 1

    def gradient(self, params: Params) -> tuple[Tensor, Params]:
        """Call the closure for loss and gradient at other parameters."""
        self.count += 1
        self._found.append(self._gradient(params))
        return self._found[-1]

    def at(self, params: Params, evaluation: int) -> Params:
        """Go to where an iteration ends, and return the gradient there: of its so many-th evaluation, if of any."""
        if not evaluation:
            self.gradient(params)
        self.value, grads = self._found[evaluation - 1]
        self._found = []
        return grads


def _is_the_loss(result: object, passes: Sequence[BackwardPass] | None) -> bool:
    """Say whether what a closure returns is what it differentiates, and not a part of it or a number."""
    return (
        passes is not None
        and len(passes) == 1
        and isinstance(result, Tensor)
        and result.numel() == 1
        and result.data_ptr() == passes[0].value.data_ptr()
    )


def _largest(rows: Tensor) -> float:
    return float(rows.abs().max()) if rows.numel() else 0.0
