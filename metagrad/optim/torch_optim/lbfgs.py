"""L-BFGS as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from metagrad.core._torch import backward
from metagrad.core.tree import widened
from metagrad.optim.hyperparameters import check_count
from metagrad.optim.newton.lbfgs import LBFGSRule
from metagrad.optim.probes import torchs_own
from metagrad.optim.rule import Params
from metagrad.optim.torch_optim.closure_objective import BackwardPass, GraphCurvature, scalar_of
from metagrad.optim.torch_optim.curvature_optimizer import leaves_behind
from metagrad.optim.torch_optim.lbfgs_descent import Descent, Evaluate, History, Iteration, Options, flat
from metagrad.optim.torch_optim.move import Change
from metagrad.optim.torch_optim.newton_optimizer import NewtonOptimizer
from metagrad.optim.torch_optim.optimizer import Option, as_number


class LBFGS(
    NewtonOptimizer, rule=LBFGSRule, history_size=100, line_search_fn="strong_wolfe", tolerance_change=1e-9
):
    r"""Optimize by L-BFGS, up to ``max_iter`` iterations a step, as ``torch.optim.LBFGS`` does.

    .. math:: w_t = w_{t-1} - \eta \, \alpha_t B_t g_t

    see :func:`~metagrad.optim.newton.lbfgs.lbfgs`, whose steps the iterations are. ``step(closure)`` calls the
    closure for loss and gradient where it begins, and then for both at other parameters, and iterates until the
    largest element of the gradient is at most ``tolerance_grad``, neither the loss nor any parameter changes by more
    than ``tolerance_change``, or ``max_iter`` iterations or ``max_eval`` calls are made. It returns the loss at its
    beginning, and leaves the gradient there in ``.grad``. Without a closure, after ``loss.backward()``, a step is one
    iteration, with gradients that may be clipped or accumulated.

    The first step observes which losses the closure calls ``backward`` on. If that is the one it returns, or if it
    writes gradients without ``backward``, the loss of later steps is what it returns, also of closures defined anew
    by the same code. Else every step observes, and the loss is what ``backward`` was called on.

    Names and defaults are torch's, but for the line search, which is on; the length that it begins with is ``lr``.
    Groups may differ in step size and weight decay.

    Raises:
        ValueError: As for :class:`NewtonCG`.
        TypeError: As for :class:`NewtonCG`.
        RuntimeError: In a step, a closure that has returned its loss returns something else.

    Example:
        >>> import torch
        >>> from metagrad.optim.torch_optim.lbfgs import LBFGS
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

    differentiates_twice = False
    # Where the gradient at the start is not finite, the new parameters are not, and no pair is added.
    implied = ("place", "gradient", "moves", "changes", "products")
    options: ClassVar[Mapping[str, Option]] = {
        "max_iter": Option(20, "The most iterations of a step.", "int"),
        "max_eval": Option(
            None,
            "The most calls of the closure in a step; None is 5/4 of ``max_iter``, but at least 25, which is enough "
            "for a line search.",
            "int | None",
        ),
        "tolerance_grad": Option(
            1e-7, "A step ends where no element of the gradient, weight decay included, is larger.", "float"
        ),
        **NewtonOptimizer.options,
    }
    _known: object = None
    """Identifies, by their code, closures that are known to return the loss that they differentiate."""

    def _forget(self) -> None:
        super()._forget()
        self._differentiated: list[Tensor] = []

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        name, group = type(self).__name__, self.param_groups[index]
        for option in ("max_iter", "max_eval"):
            if (option, group[option]) != ("max_eval", None):
                check_count(f"{name}(params)", option, group[option])
        if not group["tolerance_grad"] >= 0:
            raise ValueError(
                f"{name}(params): tolerance_grad must be at least 0, got {group['tolerance_grad']!r}."
            )

    def _is_curvature_due(self) -> bool:
        closure = self.__dict__.get("_closure")
        return super()._is_curvature_due() if closure is None else self._known != _code_of(closure)

    def _refuse_averaged(self) -> None:
        if self._closure is not None:  # else the gradient is all there is
            super()._refuse_averaged()

    def _evaluated(self, closure: Callable[..., Any]) -> Any:
        """Call the closure, and record what it differentiates, unless that is known to be what it returns."""
        is_observed = self._is_curvature_due()
        result = super()._evaluated(closure)
        loss = result if isinstance(result, Tensor) and result.numel() == 1 else None
        # A closure that calls no backward writes the gradients of what it returns by itself.
        writes = is_observed and self._passes is None and self.group is None
        if is_observed and (not writes or loss is None):
            returns_loss = _is_the_loss(loss, self._passes) and not self._asked_for_graph
            self._known = _code_of(closure) if returns_loss else None
        elif loss is not None:
            self._known = _code_of(closure)
            self._differentiated = [loss]
            self._passes = [BackwardPass(loss.detach(), {}, ())]
        else:
            self._known = None
            raise RuntimeError(
                f"{type(self).__name__}.step(closure): the closure has returned the loss that it differentiates, and "
                "now returns something else. Return the loss at every call."
            )
        return result

    def _backward_with_curvature(
        self,
        loss: Tensor,
        gradient: Tensor | None,
        retain_graph: bool | None,
        inputs: Tensor | Sequence[Tensor] | None,
    ) -> None:
        """Accumulate gradients as torch does: there is no curvature to be taken of the graph."""
        self._differentiated = [*self._differentiated, loss]
        backward(loss, gradient, retain_graph, inputs=inputs)
        self._losses = [*self._losses, loss.detach()]
        own = BackwardPass(scalar_of(loss, gradient).detach(), {}, ())
        self._passes = [*(self._passes or []), own]

    def _changed(self, params: Params, grads: Params) -> tuple[Change, tuple[Any, ...]]:
        """Iterate from where all parameters are."""
        for index in range(1, len(self.param_groups)):
            self._check_agreement(index)
        value, evaluate = self._objective_at(params)
        values = {key: widened(p) for key, p in params.items()}
        descent = Descent(values, grads, value, evaluate, self._options(values, evaluate is None))
        step, last = self._resume(params, descent.at.w)
        descent.run(self._history, last)
        if not descent.report.length and descent.report.evaluations:
            self._known = (
                None  # the loss and the gradient of a closure that has changed may be of different losses
            )
        counts = {"iterations": descent.num_iterations, "evaluations": descent.num_evaluations}
        return self._change(params, descent, step), (descent.report, {} if evaluate is None else counts)

    def _objective_at(self, params: Params) -> tuple[float, Evaluate | None]:
        """Return the loss of the closure, and what evaluates it elsewhere, if there is a closure."""
        mean = self._mean()
        if self._closure is None:
            self._curvature(self.param_groups[0], params, {})  # which says what a line search lacks
            return math.nan, None
        if self._passes is None and mean.share:
            raise self._without_curvature()
        evaluation = functools.cache(lambda: self._evaluation(params))  # observed when it is asked for
        value = GraphCurvature(params, self._passes or [], mean=mean).value.item()
        return value, lambda at: evaluation()(at)

    def _evaluation(self, params: Params) -> Evaluate:
        """Return what calls the closure at other parameters, for its loss and its gradients."""
        leaves = [leaf for loss in self._differentiated for leaf in leaves_behind(loss)]
        every = list(dict.fromkeys([*self._all_params(), *leaves]))
        objective = self._objective(params, torchs_own, every)
        # Hooks that see what is accumulated see it once a step.
        has_hooks = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in every)
        is_own = self._known is None or has_hooks or self.group is not None
        return objective.gradient if is_own else objective.called

    def _options(self, values: Params, is_single: bool) -> Options:
        first, rules = self.param_groups[0], [self._rule(group) for group in self.param_groups]
        max_iter = 1 if is_single else first["max_iter"]
        return Options(
            self._of_all("lr", rules, values),
            self._of_all("weight_decay", rules, values),
            first["maximize"],
            max_iter,
            first["max_eval"] or max(max_iter * 5 // 4, 25),
            first["tolerance_grad"],
            first["tolerance_change"],
            first["history_size"],
            first["line_search_fn"],
        )

    def _of_all(self, name: str, rules: Sequence[Any], values: Params) -> float | Tensor:
        """Return a hyper-parameter, as a vector where groups have several."""
        numbers = {float(getattr(rule, name)) for rule in rules}
        if len(numbers) == 1:
            return numbers.pop()
        named = self._groups_by_name()
        return flat(torch.full_like(p, float(named[key][0][name])) for key, p in values.items())

    def _resume(self, params: Params, w: Tensor) -> tuple[int, tuple[Tensor, Tensor] | None]:
        """Take up the history, and return the number of iterations and the last place of an earlier step."""
        states = [self.state.get(p, {}) for p in params.values()]
        first, steps = states[0], {state.get("step") for state in states}
        known = self.__dict__.get("_history")
        if len(steps) > 1 or "place" not in first or first["place"].shape != w.shape:
            self._history = History(w)  # of other parameters: they come and go
            return 0, None
        if known is None or known.moves is not first["moves"]:
            self._history = History.of(first["moves"], first["changes"], first["products"])
        return first["step"], (first["place"], first["gradient"])

    def _change(self, params: Params, descent: Descent, step: int) -> Change:
        if descent.last is None:
            return Change({}, {}, {})
        states: dict[str, Any] = {key: {"step": step + descent.num_iterations} for key in params}
        place, gradient = descent.last
        history = self._history
        next(iter(states.values())).update(
            place=place,
            gradient=gradient,
            moves=history.moves,
            changes=history.changes,
            products=history.products,
        )
        moved = descent.tensors(descent.at.w) if descent.report.length else {}
        return Change(params, moved, states, implied=self.implied)

    def _described(self, report: Iteration, counts: Mapping[str, int], /) -> dict[str, float | int | str]:
        """Say what a step did; by a closure also its ``iterations``, and ``evaluations`` of the closure."""
        length, evaluations = report
        return {
            "steps": evaluations,
            "products": 0,
            "ending": "NONE",
            "ratio": math.nan,
            "length": length * max(float(as_number(group["lr"])) for group in self.param_groups),
            "direction": "quasi_newton" if length else "none",
            **counts,
        }


def _code_of(closure: Callable[..., Any]) -> object:
    """Return the code of a closure, which identifies closures that are defined anew at every step."""
    return getattr(closure, "__code__", closure)


def _is_the_loss(loss: Tensor | None, passes: Sequence[BackwardPass] | None) -> bool:
    """Say whether the number that a closure returns is what it differentiates, and not a part of it."""
    if loss is None or not loss.requires_grad:
        return False
    return [loss.data_ptr()] == [one.value.data_ptr() for one in passes or ()]
