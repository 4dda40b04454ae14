"""Newton's method and Gauss-Newton by conjugate gradients, damped: Hessian-free optimization."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.derivatives.recorded import Product, Recorded
from metagrad.core._torch import linalg
from metagrad.core.checks import check_number, check_positive
from metagrad.core.substitution import own_buffers
from metagrad.core.tree import HALF, Params, widened
from metagrad.curvature.likelihoods import OutputLoss
from metagrad.curvature.operators.ggn import flattened
from metagrad.curvature.solvers.methods import CG, RESULTS, Run, Start
from metagrad.curvature.solvers.solution import Result
from metagrad.optim.newton.vector import Objective, VectorOptimizer, flat, split, without_gradients
from metagrad.optim.second_order.curvature_optimizer import BackwardPass, LossRecorder, options_of, scalar_of
from metagrad.optim.torch_optim.optimizer import ParameterGroups, ParamsWithGrad, as_number
from metagrad.optim.torch_optim.state import PendingUpdate

POOR, GOOD = 0.25, 0.75
"""Damping increases below the first ratio of actual to predicted reduction, and decreases above the second."""
LEAST_FACTOR, MOST_FACTOR = 1e-10, 1e10
"""Bounds of the factor that multiplies the initial damping, so that the damping can recover."""
_SUFFICIENT = 1e-4  # share of the slope that a line search must achieve
_SHORTEST = 2.0**-30  # the shortest length that a line search tries
_FIRST = 0.1  # share of the curvature along a step that becomes the damping if it was 0


class Curvature:
    """The curvature matrix of a sum of losses whose graphs are alive, for all parameters as one vector.

    Args:
        params: Parameters by name.
        passes: The losses.
        matrix: ``"hessian"``, ``"ggn"`` or ``"fisher"``.
        scale: Factor of the matrix.
    """

    def __init__(
        self, params: Params, passes: Sequence[BackwardPass], matrix: str, scale: float = 1.0
    ) -> None:
        self._params, self._passes, self._matrix, self._scale = params, passes, matrix, scale
        self._losses = [loss for one in passes for loss in one.losses]
        self._sizes = [loss.loss.output.numel() for loss in self._losses]
        self._is_half = any(p.dtype in HALF for p in params.values())

    @cached_property
    def _recorded(self) -> Recorded:
        params = self._params.values()
        inputs = [p if p.requires_grad else p.detach().requires_grad_() for p in params]
        outputs = [loss.loss.output for loss in self._losses]
        if self._matrix == "hessian":
            outputs = [one.grads.get(p, torch.zeros_like(p)) for one in self._passes for p in params]
        return Recorded("opt.step", outputs, dict(zip(self._params, inputs, strict=True)))

    def __matmul__(self, v: Tensor) -> Tensor:
        """Multiply a vector. In half precision it is scaled to size one, so that nothing underflows or overflows."""
        if not self._is_half:
            return self._scale * self._product(v)
        size = v.abs().amax()
        return self._scale * size * widened(self._product(v / torch.where(size == 0, 1, size)))

    def _product(self, v: Tensor) -> Tensor:
        if self._matrix == "hessian":
            return self._recorded.pull(v if len(self._passes) == 1 else v.repeat(len(self._passes)))
        if not self._losses:
            return torch.zeros_like(v)
        images = self._recorded.push(v).split_with_sizes(self._sizes)
        products = [self._of_output(*loss, v) for loss, v in zip(self._losses, images, strict=True)]
        return self._recorded.pull(torch.cat(products))

    def _of_output(self, loss: OutputLoss, weight: Tensor, v: Tensor) -> Tensor:
        """Multiply a vector by the matrix of the output of one loss."""
        if self._matrix == "ggn":
            return weight * flattened(loss.hessian_product, loss.output)(v)
        # Maximizing a log-likelihood uses the same Fisher matrix, with a positive sign.
        return weight.abs() * flattened(loss.fisher_product, loss.output)(v)


def conjugate_gradients(
    multiply: Product, b: Tensor, x0: Tensor | None, rtol: float, progress: float | None, max_steps: int
) -> Run:
    r"""Minimize :math:`\phi(x) = x^\top A x / 2 - b^\top x` by conjugate gradients.

    The iteration ends at a residual of ``rtol`` times the norm of ``b``, by Martens' rule, or at a direction
    :math:`p` with :math:`\kappa = p^\top A p / p^\top p \le 0`. Along that direction it takes one more step, whose
    length uses :math:`|\kappa|`, so the model decreases.

    Args:
        multiply: Multiplies a vector with A.
        b: The right-hand side.
        x0: Initial solution, unless it is worse than 0. None means 0.
        rtol: Relative tolerance of the residual, at least the precision of the dtype.
        progress: Stop at step i when :math:`\phi` fell by less than :math:`k \epsilon |\phi|` in the last
            :math:`k = \max(10, i / 10)` steps. None disables this rule.
        max_steps: Maximum number of steps.

    Returns:
        The run of one row.

    Example:
        >>> from metagrad.optim.newton.newton import conjugate_gradients
        >>> scales, b = torch.tensor([1.0, 4.0]), torch.tensor([2.0, 4.0])
        >>> found = conjugate_gradients(lambda v: v * scales, b, None, 1e-10, None, 250)
        >>> found.x.round(decimals=4), int(found.steps)
        (tensor([[2., 1.]]), 2)

    References:
        Hestenes, Stiefel, J. Res. NBS 49, 1952; Martens, "Deep learning via Hessian-free optimization", ICML 2010,
        section 4.4; Dauphin et al., "Identifying and attacking the saddle point problem", NeurIPS 2014, for the step
        by the absolute curvature.
    """
    x, r, spent = torch.zeros_like(b), b, 0
    if x0 is not None:
        residual, spent = b - multiply(x0), 1
        if float(x0.dot(b + residual)) > 0:
            x, r = x0, residual
    solver, start = CG(progress, follows_negative=True), Start(b[None], x[None], r[None])
    tolerance = max(rtol, 2 * torch.finfo(b.dtype).eps) * linalg.vector_norm(b).reshape(1)
    run = solver.run(lambda rows: multiply(rows[0])[None], start, None, tolerance, max_steps)
    return run._replace(matvecs=run.matvecs + spent)


class Problem(NamedTuple):
    """The system of a step."""

    params: Params
    passes: Sequence[BackwardPass]  # of all the data
    objective: Objective
    curvature: Curvature
    w: Tensor
    g: Tensor  # the gradient of the objective

    def multiply(self, v: Tensor) -> Tensor:
        """Multiply a vector with the matrix."""
        return self.objective.moving(self.curvature @ v + self.objective.decay * v)


class Step(NamedTuple):
    """A step, with the slope and the curvature of the quadratic model along it."""

    d: Tensor
    slope: float  # g^T d
    curved: float  # d^T B d


class Descent:
    """The objective of a step at its start, and along a direction.

    Args:
        before: The value at the start of the step.
        evaluate: A function from parameters to the value.
        eps: The relative rounding error of a value.
    """

    def __init__(self, before: float, evaluate: Callable[[Tensor], float], eps: float) -> None:
        self.before, self.evaluate, self.slack = before, evaluate, 10 * eps * abs(before)

    def ratio(self, after: float, predicted: float) -> float:
        """Divide the reduction of the loss by the reduction of the model.

        A bound of the rounding error is added to both, so a step at convergence has the ratio 1 (Conn, Gould, Toint,
        "Trust-region methods", 2000, section 17.4.2). The ratio is minus infinity if the loss is not finite, or if
        the model predicts that the step climbs.
        """
        reduction, expected = self.before - after + self.slack, self.slack - predicted
        if reduction == expected == 0:
            return 1.0
        is_sound = math.isfinite(after) and expected > 0
        return reduction / expected if is_sound and math.isfinite(reduction / expected) else -math.inf

    def searched(self, w: Tensor, step: Step, after: float) -> float:
        """Halve a step until the loss has decreased enough, and return its length, or 0."""
        length = 1.0
        while not after <= self.before + _SUFFICIENT * length * step.slope + self.slack:
            if length <= _SHORTEST:
                return 0.0
            length /= 2
            after = self.evaluate(w + length * step.d)
        return length


class NewtonCG(VectorOptimizer):
    r"""Optimize by Newton's method with conjugate gradients: Hessian-free optimization.

    .. math::
        (H_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \alpha_t s_t, \qquad
        s_t = \eta \, d_t, \qquad
        \rho_t = \frac{f(w_{t-1} + s_t) - f(w_{t-1})}{g_t^\top s_t + s_t^\top H_t s_t / 2}

    Conjugate gradients compute :math:`d` by Hessian-vector products. The length :math:`\alpha` is the largest of 1,
    1/2, 1/4, ... that lowers the loss by :math:`10^{-4}` of the slope. The damping :math:`\lambda` is divided by
    ``change`` if :math:`\rho > 3/4`, and multiplied by it if :math:`\rho < 1/4`. A damping of 0 increases to a tenth
    of the curvature along the step.

    At a direction of negative curvature, conjugate gradients take one last step along it, by the absolute value of
    the curvature. This step descends, and escapes saddle points that slow gradient descent down. A gradient of
    exactly zero counts as a minimum.

    The closure is called once for gradient and curvature. Further calls only evaluate the loss, and their
    ``backward`` does nothing. Losses of several backward passes add up. Products with the curvature dominate
    the cost of a step, and they need less data than the gradient. ``opt.step(closure, curvature=part)`` takes
    the curvature from another closure, for a part of the data. See
    :class:`~metagrad.optim.newton.vector.VectorOptimizer` for the options that all groups share, and for random
    numbers and buffers in further calls of the closure.

    With a ``GradScaler`` there is no closure to evaluate, so damping cannot adapt: use ``adapt=False``,
    ``opt.backward(scaler.scale(loss))`` and ``scaler.step(opt)``. Gradients and curvature are unscaled.

    Args:
        params: Parameters, with or without names, or groups of parameters with their own ``lr``, ``weight_decay`` and
            ``damping``.
        lr: The factor :math:`\eta` of every step.
        weight_decay: :math:`\gamma`: the loss includes the penalty :math:`\gamma |w|^2 / 2`, in its gradient, its
            matrix and its reduction.
        damping: :math:`\lambda_0`. With adaptation, a schedule of the damping is multiplied by the current factor.
        warm_start: Conjugate gradients start at this share of the last solution, at the cost of one product. With 0,
            conjugate gradients start at 0. Martens uses 1.
        rtol: Conjugate gradients end at this norm of the residual, relative to the norm of the gradient.
        progress: Conjugate gradients end if the model decreases by less than this for each step (Martens'
            rule). None disables it.
        max_steps: Maximum number of steps of conjugate gradients.
        adapt: Evaluate the loss at the end of a step, to adapt damping and length. This costs a forward pass or
            more. Otherwise both are constant, and a step may climb.
        change: The factor of the damping, above 1.
        maximize: Maximize the loss: negate the gradient.
        nonfinite: Reaction if the loss, a gradient or the curvature is NaN or infinite. ``"raise"`` raises an
            error. ``"skip"`` leaves the step out and counts it in ``opt.stats``. Parameters and state do not change.

    Raises:
        ValueError: A hyperparameter is out of its range, or parameters differ in dtype or device.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import NewtonCG
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> opt = NewtonCG([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (torch.tensor([1.0, 100.0]) * (w - 3) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> float(opt.step(closure)), torch.allclose(w, torch.tensor(3.0)), opt.stats["ending"]
        (104.0, True, 'CONVERGED')

    References:
        Martens, "Deep learning via Hessian-free optimization", ICML 2010, section 4; Nocedal, Wright, "Numerical
        optimization", 2006, section 7.1; Dauphin et al., "Identifying and attacking the saddle point problem in
        high-dimensional non-convex optimization", NeurIPS 2014.
    """

    own_to_groups = ("lr", "weight_decay", "damping")
    counts = ("max_steps",)
    fractions = ("rtol",)
    _curvature_closure: Callable[[], Any] | None = None
    _more: Mapping[str, Any] = {}  # options of a subclass
    # Stats of the step in progress and of the last step that was written, with factor and addend of the damping.
    _found: dict[str, Any] | None = None
    _last: dict[str, Any] | None = None

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        weight_decay: float | Tensor = 0.0,
        damping: float | Tensor = 0.0,
        warm_start: float | Tensor = 0.0,
        rtol: float = 1e-10,
        progress: float | None = 5e-4,
        max_steps: int = 250,
        adapt: bool = True,
        change: float = 1.5,
        maximize: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        self._initialize(params, {**options_of(locals()), **self._more})

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the last step.

        - ``steps`` and ``products`` of conjugate gradients.
        - ``ending`` of the solver, a name of :class:`metagrad.curvature.Result`.
        - ``ratio`` of the reductions of loss and model. NaN if the loss was not evaluated.
        - ``damping`` of the next step, in the first group.
        - ``length`` of the step in units of its direction, by the largest step size. 0 if nothing moved.
        - ``skipped``, as in all optimizers, also before the first step.
        """
        if self._last is None:
            return super().stats
        factor, added = self._last["damping"]
        damping = float(as_number(self.param_groups[0]["damping"])) * factor + added
        return {**self._last, "damping": damping, **super().stats}

    def step(
        self, closure: Callable[[], Any] | None = None, *, curvature: Callable[[], Any] | None = None
    ) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss and its gradients, and returns the loss. Further calls only need the loss.
            curvature: A closure of the same form for a part of the data. Its curvature replaces the curvature of
                all data.

        Returns:
            The result of the first call of the closure, without its graph.

        Raises:
            ValueError: ``curvature`` is given without ``closure``.
        """
        if curvature is not None and closure is None:
            raise ValueError(
                f"{type(self).__name__}.step(curvature=...): there is no closure. Call opt.step(closure, "
                "curvature=...), with closures of all the data and of a part of them."
            )
        self._curvature_closure = curvature
        try:
            return super().step(closure)
        finally:
            self._curvature_closure = None

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        group, call = self.param_groups[index], f"{type(self).__name__}(params)"
        check_positive(f"{call}: progress", as_number(group["progress"]), optional=True)
        check_number(f"{call}: change", as_number(group["change"]), 1)

    def _evaluated(self, closure: Callable[..., Any]) -> Any:
        result = super()._evaluated(closure)
        if self._curvature_closure is None:
            return result
        passes, self._passes = self._passes, []
        with without_gradients(self._all_params()), own_buffers(self._modules):
            super()._evaluated(self._curvature_closure)
        if not self._passes:
            raise RuntimeError(
                f"{type(self).__name__}.step: the closure that the curvature is taken of calls no backward. "
                "Call loss.backward() in it, as in the closure of all data."
            )
        self._curved, self._passes = self._passes, passes
        return result

    def _observe(self, graph: BackwardPass) -> None:
        params = self._all_params()
        if all(p.grad is None for p in params):  # gradients of earlier passes were dropped
            self._passes = [one for one in self._passes if one.grads.keys().isdisjoint(params)]
        self._passes.append(graph)

    def _forget(self) -> None:
        super()._forget()
        self._passes: list[BackwardPass] = []
        self._curved: list[BackwardPass] = []  # of the closure for a part of the data

    def _move(self) -> None:
        before = self.param_groups[0]["step"]
        super()._move()
        if self.param_groups[0]["step"] > before:
            self._last = self._found

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        """Solve the system of a step, adapt the damping, and look for a length."""
        params, group, problem = work.params, self.param_groups[0], self._problem(work)
        factor, added, start = self._resumed(params)
        damping = factor * self._column("damping", params) + added
        x0 = None if start is None else float(group["warm_start"]) * start
        limits = group["rtol"], group["progress"], group["max_steps"]
        run = conjugate_gradients(lambda v: problem.multiply(v) + damping * v, -problem.g, x0, *limits)
        step = self._step(problem, run, damping)
        length, ratio = 1.0, math.nan
        if group["adapt"]:
            descent = self._descent(problem)
            after = descent.evaluate(problem.w + step.d)
            ratio = descent.ratio(after, step.slope + step.curved / 2)
            factor, added = self._adapted(factor, added, damping, ratio, step)
            length = descent.searched(problem.w, step, after)
        result, products = RESULTS[int(run.status)], run.matvecs + problem.objective.lr.ndim
        told = {"steps": int(run.steps), "products": products, "ending": result.name, "ratio": ratio}
        change = self._change(problem, step.d, length, (factor, added), told)
        for key, part in split(run.x[0], params).items() if group["warm_start"] else ():
            change.states[key]["solution"] = part
        curved = math.nan if result is Result.NON_FINITE else step.curved
        yield dataclasses.replace(change, used={"the curvature": run.x.new_tensor(curved)})

    def _problem(self, work: ParamsWithGrad) -> Problem:
        params, group = work.params, self.param_groups[0]
        if not self._passes:
            raise self._without_curvature()
        if group["adapt"] and self._closure is None:
            raise RuntimeError(
                f"{type(self).__name__}.step: adapt=True looks at the loss at other parameters, for which it is "
                "computed again. Call opt.step(closure), or set adapt=False."
            )
        objective, matrix = self._objective(params), group.get("matrix", "hessian")
        # The Fisher matrix is a metric, so ``maximize`` does not change its sign.
        sign = 1 if matrix == "fisher" else objective.sign
        curvature = Curvature(params, self._curved or self._passes, matrix, sign * self._inverse_scale())
        w = flat(params.values())
        g = objective.gradient(flat(work.grads.values()), w)
        return Problem(params, self._passes, objective, curvature, w, g)

    def _step(self, problem: Problem, run: Run, damping: Tensor) -> Step:
        """Return the step along a solution, with the sign that descends."""
        x, g, lr = run.x[0], problem.g, problem.objective.lr
        image = -g - run.residual[0] - damping * x  # the product of the matrix and x
        if float(g.dot(x)) > 0:
            # With negative curvature an iterate may climb at first. Its opposite has the same model and descends.
            x, image = -x, -image
        d = problem.objective.scaled(x, g)
        image = problem.multiply(d) if lr.ndim else lr * image
        return Step(d, float(g.dot(d)), float(d.dot(image)))

    def _resumed(self, params: Params) -> tuple[float, float, Tensor | None]:
        """Return the factor and addend of the damping, and the last solution."""
        states = self._shared_states(params)
        is_kept = self.param_groups[0]["warm_start"] and all("solution" in state for state in states)
        solution = flat(state["solution"] for state in states) if is_kept else None
        return states[0].get("factor", 1.0), states[0].get("added", 0.0), solution

    def _change(
        self, problem: Problem, d: Tensor, length: float, damping: tuple[float, float], told: dict[str, Any]
    ) -> PendingUpdate:
        """Return the update that a step writes, with the factor and addend of the next damping."""
        params = problem.params
        told["length"] = length * float(problem.objective.lr.max())
        self._found = {**told, "damping": damping}
        number = self._shared_states(params)[0].get("step", 0) + 1
        states = {key: {"step": number, "factor": damping[0], "added": damping[1]} for key in params}
        moved = split((problem.w + length * d).to(problem.w.dtype), params) if length else {}
        return PendingUpdate(params, moved, states)

    def _descent(self, problem: Problem) -> Descent:
        values, w, objective = [one.value for one in problem.passes], problem.w, problem.objective
        eps = max(torch.finfo(each.dtype).eps for each in (w, *values))
        before = objective.value(float(sum(values)), w)
        return Descent(before, lambda w: objective.value(self._loss_at(problem, w), w), eps)

    def _loss_at(self, problem: Problem, w: Tensor) -> float:
        """Return the loss of the closure at other parameters."""
        values: list[Tensor] = []

        def backward(loss: Tensor, gradient: Tensor | None = None, *_: Any, **__: Any) -> None:
            if any(one.loss is not None and one.loss() is loss for one in problem.passes):
                raise self._loss_of_before()
            values.append(scalar_of(loss, gradient))

        with self._elsewhere(problem.params, w) as closure, LossRecorder(backward, note_losses=False):
            closure()
        if not values:
            raise RuntimeError(
                "opt.step(closure): the closure has called loss.backward() at its first call, and not at a later. "
                "What it is called on is the loss, also at other parameters: call it every time."
            )
        return float(sum(values))

    def _adapted(
        self, factor: float, added: float, damping: Tensor, ratio: float, step: Step
    ) -> tuple[float, float]:
        """Levenberg's and Marquardt's heuristic: more damping after a poor step, less after a good one."""
        change = self.param_groups[0]["change"]
        change = 1 / change if ratio > GOOD else change if ratio < POOR else 1.0
        factor = min(max(factor * change, LEAST_FACTOR), MOST_FACTOR)
        if ratio < POOR and bool((damping == 0).any()):
            squared = float(step.d.dot(step.d))
            return factor, _FIRST * abs(step.curved) / squared if squared > 0 else 0.0
        return factor, added * change
