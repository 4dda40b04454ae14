"""The method of Gauss and Newton with adaptive damping, by dense factorizations or conjugate gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from metagrad.autograd.derivatives.recorded import Recorded
from metagrad.core._torch import linalg
from metagrad.core.checks import check_choice, check_function, is_a
from metagrad.core.tree import Params
from metagrad.curvature.likelihoods import Gaussian, OutputLoss
from metagrad.curvature.operators.jacobian import Examples
from metagrad.curvature.solvers.solution import Result
from metagrad.optim.newton.newton import LEAST_FACTOR, MOST_FACTOR, Descent, NewtonCG, Problem
from metagrad.optim.newton.vector import split
from metagrad.optim.second_order.curvature_optimizer import RecordedLoss, WeightedLoss
from metagrad.optim.torch_optim.optimizer import ParameterGroups, ParamsWithGrad
from metagrad.optim.torch_optim.state import PendingUpdate

_REFUSALS = 60  # maximum number of rejected steps in one call of ``step``
_MORE = 2.0  # factor of the damping after a rejected step
LARGEST = 5000
"""Limit of ``solver="auto"``: a dense system has at most this number of residuals or of parameters."""
LARGEST_WHOLE = 500
"""The same limit for residuals without ``data``, whose rows cost one product each."""
MOST_BYTES = 2**30
"""Limit of ``solver="auto"``: the Jacobian of a dense system has at most this number of bytes in float64."""
_CHUNK = 2**28  # bytes of rows that are computed together
_DIFFERENCE = 0.1  # fraction of a step for the finite difference of the second derivative
_LONGEST = 0.75  # maximum length of an acceleration, relative to the step
_FLOOR = 1e-15  # smaller damping, relative to the largest diagonal element, is only rounding error


class GaussNewton(NewtonCG):
    r"""Optimize by the method of Levenberg and Marquardt, for losses whose curvature in the output is known.

    .. math::
        (J_t^\top H_L J_t + \lambda_t I) \, d_t \approx -g_t, \qquad w_t = w_{t-1} + \alpha_t \eta \, d_t

    with the Jacobian :math:`J` of the model's outputs and the Hessian :math:`H_L` of the loss with respect to them.
    For squared errors, this is nonlinear least squares. With ``matrix="fisher"``, :math:`H_L` is the Fisher matrix
    of the likelihood whose negative logarithm is the loss. This is natural gradient descent.

    ``solver="dense"`` factorizes the system, in float64 and in the smaller of its two spaces. A step that does not
    descend is rejected, and the system is factorized again with more damping. The dense solver needs rows of the
    Jacobian, so losses must come from :meth:`residuals`. With ``geodesic``, the step follows the curvature of the
    residuals. This costs one evaluation of the residuals. For a few thousand parameters or residuals, a dense step
    costs less than a handful of products. A dense step is exact, while conjugate gradients stop early.

    With ``solver="cg"``, damping and length are as in :class:`NewtonCG`. Products dominate the cost, so the direction
    of a step that does not descend is kept, and its length is reduced.

    The loss has to be computed inside the closure, or within ``with opt.recording():``. There, calls of
    ``F.mse_loss``, ``F.cross_entropy``, ``F.nll_loss``, ``F.gaussian_nll_loss``, ``F.binary_cross_entropy`` and
    ``F.binary_cross_entropy_with_logits`` (also by their modules) are recorded. For residuals ``r``, use
    ``F.mse_loss(r, torch.zeros_like(r))`` or :meth:`residuals`. For a custom likelihood, use :meth:`output_loss`.
    :func:`metagrad.optim.least_squares` fits residuals without a loop. Other parts of the loss, such as a penalty,
    enter only the gradient.

    Args:
        params: Parameters, as in :class:`NewtonCG`.
        lr: The factor :math:`\eta` of every step.
        matrix: ``"ggn"``, the Gauss-Newton matrix, or ``"fisher"``, the exact Fisher matrix.
        damping: :math:`\lambda_0`. A schedule of the damping is multiplied by the factor from the reduction
            ratios.
        change: The factor of the damping, above 1. A dense step that is rejected doubles the damping.
        solver: ``"dense"``, ``"cg"`` or ``"auto"``. ``"auto"`` is dense if all losses of known form come from
            :meth:`residuals`, and their Jacobian takes at most 1 GiB. There must be at most 5,000 residuals or at
            most 5,000 parameters. For a function without examples it is 500.
        geodesic: Whether a dense step is accelerated.
        **more: The other arguments of :class:`NewtonCG`. Dense steps use no option of conjugate
            gradients.

    Raises:
        ValueError: A hyperparameter is out of its range, or parameters differ in dtype or device. In a step, the
            loss contains no loss of known form.
        TypeError: A parameter is complex, or a hyperparameter is not a number.

    Example:
        >>> from metagrad.optim import GaussNewton
        >>> x, w = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0.0], requires_grad=True)
        >>> opt = GaussNewton([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = torch.nn.functional.mse_loss(w[0] * torch.exp(w[1] * x), 2 * torch.exp(-x))
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(12):
        ...     loss = opt.step(closure)
        >>> torch.allclose(w, torch.tensor([2.0, -1.0]), atol=1e-4)
        True

    References:
        Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", J. SIAM 11(2), 1963;
        Schraudolph, "Fast curvature matrix-vector products", Neural Computation 14(7), 2002; Amari, "Natural gradient
        works efficiently in learning", Neural Computation 10(2), 1998; Martens, "New insights and perspectives on the
        natural gradient method", JMLR 21, 2020.
    """

    notes_losses = True
    differentiates_gradients = False

    def __init__(
        self,
        params: ParameterGroups,
        lr: float | Tensor = 1.0,
        *,
        matrix: Literal["ggn", "fisher"] = "ggn",
        damping: float | Tensor = 1e-3,
        change: float = 3.0,
        solver: Literal["auto", "dense", "cg"] = "auto",
        geodesic: bool = True,
        **more: Any,
    ) -> None:
        self._more = {"matrix": matrix, "solver": solver, "geodesic": geodesic}
        super().__init__(params, lr, damping=damping, change=change, **more)

    def output_loss(self, loss_fn: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        r"""Evaluate a loss that :class:`GaussNewton` does not recognize, and record its Hessian.

        Args:
            loss_fn: Convex function of an output to its loss, of one element. It is called again for every product,
                with the same output.
            output: Output of the model, of any shape.

        Returns:
            ``loss_fn(output)``.

        Example:
            A Poisson regression, :math:`\ell = e^z - y z`:

            >>> from metagrad.optim import GaussNewton
            >>> x, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0])
            >>> w = torch.zeros(2, requires_grad=True)
            >>> opt = GaussNewton([w])
            >>> def closure():
            ...     opt.zero_grad()
            ...     loss = opt.output_loss(lambda z: (z.exp() - y * z).mean(), w[0] + w[1] * x)
            ...     loss.backward()
            ...     return loss
            >>> for _ in range(8):
            ...     loss = opt.step(closure)
            >>> torch.allclose(w.exp(), torch.tensor([1.0, 2.0]), atol=1e-3)
            True
        """
        if self._noted is None:
            return loss_fn(output)
        own, count = output.view_as(output), len(self._noted)  # a view, which has its own node in the graph
        value = loss_fn(own)
        known = CustomOutputLoss(own, own.new_ones(()), loss_fn)
        self._noted[count:] = RecordedLoss.of(value, known)  # none from loss_fn
        return value

    def residuals(
        self, fn: Callable[..., Tensor], *data: Any, reduction: Literal["mean", "sum"] = "mean"
    ) -> Tensor:
        """Evaluate the mean square of residuals, and record how their Jacobian is computed.

        Args:
            fn: ``fn(params, *example)`` returns the residuals of one example, a tensor of any shape. ``params`` are
                all parameters of the optimizer by name. It may differentiate with respect to the example, by
                ``torch.func.grad``. Without ``data``, ``fn(params)`` returns all residuals.
            *data: Tensors or pytrees of tensors, whose first dimension counts the examples.
            reduction: ``"mean"`` or ``"sum"`` of the squares.

        Returns:
            The mean or sum of the squares, a scalar.

        Raises:
            ValueError: Parameters of the optimizer have no names. The tensors of ``data`` differ in their first
                dimension.

        Example:
            Solve u' = -u on [0, 1] with u(0) = 1:

            >>> from metagrad.optim import GaussNewton
            >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
            >>> opt = GaussNewton(net.named_parameters())
            >>> def u(params, x): return torch.func.functional_call(net, params, x[None])[0]
            >>> def ode(params, x): return torch.func.grad(u, argnums=1)(params, x) + u(params, x)
            >>> x = torch.linspace(0, 1, 20, dtype=torch.float64)
            >>> def closure():
            ...     opt.zero_grad()
            ...     loss = opt.residuals(ode, x) + opt.residuals(lambda p, x: u(p, x) - 1, x[:1])
            ...     loss.backward()
            ...     return loss
            >>> for _ in range(40):
            ...     loss = opt.step(closure)
            >>> bool((net(x[:, None])[:, 0] - torch.exp(-x)).abs().max() < 1e-4)
            True
        """
        call = "opt.residuals(fn, *data)"
        check_function(call, "fn", fn)
        params = {key: p for key, (_, p) in self._groups_by_name().items()}
        if any(key.startswith("param_groups[") for key in params):
            raise ValueError(
                f"{call}: fn takes the parameters by name, and some have none. Make the optimizer by "
                "GaussNewton(model.named_parameters())."
            )
        check_choice(f"{call}: reduction", reduction, ("mean", "sum"))
        examples = Examples(call, fn, data) if data else None
        noted = self._noted
        # While a step looks for a length, the closure is called for its value.
        needs_graph = self._closure is None or noted is not None
        with torch.set_grad_enabled(torch.is_grad_enabled() and needs_graph):
            output: object = evaluated(fn, examples, params)
        if not is_a(output, Tensor) or not output.is_floating_point():
            got = output.dtype if is_a(output, Tensor) else type(output).__name__
            raise TypeError(f"{call}: fn must return a real floating point tensor of residuals, got {got}.")
        if noted is not None and not output.requires_grad:
            raise ValueError(
                f"{call}: the residuals do not depend on the parameters that fn was given. Compute them of these, by "
                "torch operations, without detach() or numpy."
            )
        divisor = output.numel() if reduction == "mean" else 1
        value = output.square().sum() / divisor
        if noted is not None:
            scale, two = output.new_full((), 1 / max(divisor, 1)), output.new_full((), 2.0)
            known = Residuals(output, scale, two, fn=fn, examples=examples, params=params)
            noted += RecordedLoss.of(value, known)
        return value

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        group, call = self.param_groups[index], "GaussNewton(params)"
        check_choice(f"{call}: matrix", group["matrix"], ("ggn", "fisher"))
        check_choice(f"{call}: solver", group["solver"], ("auto", "dense", "cg"))

    def _updates(self, work: ParamsWithGrad) -> Iterator[PendingUpdate]:
        problem, solver = self._problem(work), self.param_groups[0]["solver"]
        losses = [loss for one in problem.passes for loss in one.losses]
        reason = self._without_dense(problem, losses)
        if reason is not None and solver == "dense":
            raise ValueError(f'GaussNewton(solver="dense").step: {reason}, or set solver="auto".')
        if reason is not None or solver == "cg":
            yield from super()._updates(work)
        else:
            yield self._dense_update(problem, losses)

    def _without_dense(self, problem: Problem, losses: Sequence[WeightedLoss]) -> str | None:
        """Return why there is no dense system, and what to do."""
        known = [loss for loss, _ in losses if isinstance(loss, Residuals)]
        if not known or len(known) < len(losses):
            return "the rows of a loss of known form are not known. Compute it by opt.residuals(fn, *data)"
        if any(float(weight) < 0 for _, weight in losses):
            return "a sum of squares has a negative weight. Make all weights positive"
        if problem.objective.decay.ndim or self._column("damping", problem.params).ndim:
            return "groups differ in damping or weight_decay. Give all groups the same"
        if self._curved or hasattr(self, "found_inf") or self.param_groups[0]["maximize"]:
            return "curvature=, GradScaler and maximize need products. Leave them out"
        if self.param_groups[0]["solver"] == "auto" and not all(residuals.are_few for residuals in known):
            return "the Jacobian is large"
        return None

    def _dense_update(self, problem: Problem, losses: Sequence[Any]) -> PendingUpdate:
        """Factorize with more and more damping until a step descends."""
        params, group, objective = problem.params, self.param_groups[0], problem.objective
        factor, added, _ = self._resumed(params)
        base, w = float(group["damping"]), problem.w.double()
        system = DenseSystem(losses, params, problem.g, float(objective.decay), objective.lr != 0)
        descent = self._descent(problem)
        if system.is_complete:  # then the closure need not be called again
            descent = Descent(system.loss(), system.loss, torch.finfo(problem.w.dtype).eps)
        step, length, damping, ratio, solves = torch.zeros_like(w), 0.0, base * factor + added, math.nan, 0
        while not length and solves < _REFUSALS:
            damping, solves = max(damping, system.floor), solves + 1
            if system.factorize(damping):
                step, predicted = self._dense_step(system, w, objective.lr)
                if group["adapt"]:
                    ratio = descent.ratio(descent.evaluate(w + step), predicted)
                length = 0.0 if ratio <= 0 else 1.0
            damping *= 1.0 if length else _MORE
        if group["adapt"] and solves == 1:  # after a rejected step, less damping would be rejected again
            damping /= group["change"]
        factor, added = (damping / base, 0.0) if base else (1.0, damping)
        factor = min(max(factor, LEAST_FACTOR), MOST_FACTOR)
        told = {"steps": solves, "products": 0, "ending": Result.CONVERGED.name, "ratio": ratio}
        return self._change(problem, step, length, (factor, added), told)

    def _dense_step(self, system: DenseSystem, w: Tensor, lr: Tensor) -> tuple[Tensor, float]:
        """Return the step of a factorized system, and the change that is predicted without its acceleration."""
        d = system.direction()
        is_accelerated = self.param_groups[0]["geodesic"]
        step = d + system.acceleration(w, d) if is_accelerated else d
        return lr * step, system.predicted(lr * d)


@dataclass(frozen=True, eq=False)
class CustomOutputLoss(OutputLoss):
    r"""A loss of an output :math:`z`, given as a function. Each product with its Hessian differentiates it.

    Its likelihood is unknown, so there is no Fisher matrix.

    Args:
        output: :math:`z`, on the autograd graph of the model.
        scale: One.
        loss_fn: Function of an output to a loss of one element.

    Example:
        >>> from metagrad.optim.newton.gauss_newton import CustomOutputLoss
        >>> loss = CustomOutputLoss(torch.tensor([1.0, 2.0]), torch.ones(()), lambda z: (z**3).sum())
        >>> loss.hessian_product(torch.ones(2))
        tensor([ 6., 12.])
    """

    loss_fn: Callable[[Tensor], Tensor]

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Hessian."""
        with torch.enable_grad():
            z = self.output.detach().requires_grad_()
            gradient = torch.autograd.grad(self.loss_fn(z), z, create_graph=True)
        recorded = Recorded("output_loss(loss_fn, output)", gradient, {"output": z})
        return recorded.pull(vectors.reshape(-1)).view_as(z)

    def fisher_product(self, vectors: Tensor) -> NoReturn:
        """Raise ``ValueError``."""
        raise ValueError(
            "output_loss(loss_fn, output): of a loss written by hand, the Fisher matrix is not known. Use "
            'matrix="ggn", which is the same where z are natural parameters.'
        )

    def score(self, generator: torch.Generator | None) -> NoReturn:
        """Raise ``NotImplementedError``. :class:`GaussNewton` draws no labels."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Residuals(Gaussian):
    """The loss of residuals that are a known function of the parameters.

    Attributes:
        fn: ``fn(params, *example)`` returns the residuals of one example.
        examples: The function with its examples. None for ``fn(params)``, which returns all residuals.
        params: All parameters by name, at the values of the step.
    """

    fn: Callable[..., Tensor] = field(kw_only=True)
    examples: Examples | None = field(kw_only=True)
    params: Mapping[str, Tensor] = field(kw_only=True)

    @property
    def are_few(self) -> bool:
        """Whether ``solver="auto"`` makes a dense system of the residuals."""
        count, size = self.output.numel(), sum(p.numel() for p in self.params.values() if p.requires_grad)
        largest = LARGEST_WHOLE if self.examples is None else LARGEST
        return min(count, size) <= largest and 8 * count * size <= MOST_BYTES

    def columns(self, params: Params) -> Tensor:
        """Return the columns of the Jacobian for some parameters that require grad, ``[residuals, n]``."""
        if self.examples is None:
            return _rows_of_graph(self.output, params)
        return self.examples.rows(params, self.output.numel(), _CHUNK, self.params)

    def at(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return the residuals at other values of some parameters, without a graph."""
        with torch.no_grad():
            return evaluated(self.fn, self.examples, {**self.params, **params})


def evaluated(fn: Callable[..., Tensor], examples: Examples | None, params: Mapping[str, Tensor]) -> Tensor:
    """Return all residuals."""
    return fn(params) if examples is None else examples.values(params)


def _rows_of_graph(output: Tensor, params: Params) -> Tensor:
    """Compute the rows, with one product for each residual, or for each parameter if there are fewer parameters."""
    count, size = output.numel(), sum(p.numel() for p in params.values())
    graph = Recorded("opt.residuals(fn)", [output], params)
    identity = torch.eye(min(count, size), dtype=output.dtype, device=output.device)
    return graph.pull(identity) if count <= size else graph.push(identity).mT


class DenseSystem:
    r"""The Gauss-Newton system of residuals, solved in the smaller of its two spaces.

    .. math:: (J^\top J + \lambda I)^{-1} J^\top = J^\top (J J^\top + \lambda I)^{-1}

    Residuals and rows are scaled such that the loss is :math:`|r|^2 / 2`. They are float64, because
    :math:`J^\top J` squares the condition number of :math:`J`.

    Args:
        losses: The residuals in a loss, each with the derivative of the loss with respect to their mean square.
        params: The parameters that are updated, by name.
        g: Gradient of the objective, ``[n]``.
        decay: Factor of the parameters' penalty.
        moves: Whether each coordinate is updated, ``[n]``, or 0-d for all coordinates.

    Attributes:
        is_complete: True if the residuals are the whole objective.
        floor: Smallest damping that exceeds the rounding error of the system.
    """

    def __init__(
        self,
        losses: Sequence[tuple[Residuals, Tensor]],
        params: Params,
        g: Tensor,
        decay: float,
        moves: Tensor,
    ) -> None:
        self._params, self._g, self._decay = params, g.double(), decay
        self._residuals = [residuals for residuals, _ in losses]
        self._roots = [_root(*loss) for loss in losses]
        self.values = self._scaled([residuals.output.detach() for residuals in self._residuals])
        parts = [residuals.columns(params).double() for residuals in self._residuals]
        self.rows = torch.cat([root[:, None] * rows for root, rows in zip(self._roots, parts, strict=True)])
        if moves.ndim:
            self.rows *= moves
        self.is_complete: bool = decay == 0 and self._has_all_of(g)
        self._is_by_rows = self.is_complete and len(self.rows) < self.rows.shape[1]
        self._matrix = self.rows @ self.rows.mT if self._is_by_rows else self.rows.mT @ self.rows
        if decay:
            self._matrix.diagonal().add_(decay)
        self.floor: float = _FLOOR * float(self._matrix.diagonal().max())

    def factorize(self, damping: float) -> bool:
        """Factorize the damped matrix, and return whether it is positive definite."""
        damped = self._matrix.clone()
        damped.diagonal().add_(damping)
        self._factor, info = linalg.cholesky_ex(damped)
        return int(info) == 0

    def direction(self) -> Tensor:
        """Return the step of the factorized system, ``[n]``."""
        return -(self._inverse(self.values) if self._is_by_rows else self._solve(self._g))

    def acceleration(self, w: Tensor, d: Tensor) -> Tensor:
        r"""Return the geodesic acceleration of a step, or zeros if it is too long to be trusted.

        .. math:: a = -\tfrac{1}{2} (J^\top J + \lambda I)^{-1} J^\top r_{dd}, \qquad
                  r_{dd} \approx \frac{2}{h} \left( \frac{r(w + h d) - r(w)}{h} - J d \right)

        References:
            Transtrum, Sethna, "Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares
            minimization", arXiv:1201.5885, 2012, section 3.
        """
        h = _DIFFERENCE
        curved = 2 / h * ((self.at(w + h * d) - self.values) / h - self.rows @ d)
        a = -self._inverse(curved) / 2
        is_trusted = linalg.vector_norm(a) <= _LONGEST * linalg.vector_norm(d)
        return torch.where(is_trusted, a, 0.0)

    def predicted(self, step: Tensor) -> float:
        """Return the change of the objective that its quadratic model predicts."""
        moved = self.rows @ step
        return float(self._g.dot(step) + (moved.dot(moved) + self._decay * step.dot(step)) / 2)

    def at(self, w: Tensor) -> Tensor:
        """Return the scaled residuals at a vector of parameters."""
        values = {key: part.to(self._params[key].dtype) for key, part in split(w, self._params).items()}
        return self._scaled([residuals.at(values) for residuals in self._residuals])

    def loss(self, w: Tensor | None = None) -> float:
        """Return the loss of the residuals, here or at another vector of parameters."""
        values = self.values if w is None else self.at(w)
        return float(values.dot(values)) / 2

    def _inverse(self, values: Tensor) -> Tensor:
        r"""Multiply residuals by :math:`(J^\top J + \lambda I)^{-1} J^\top`."""
        if self._is_by_rows:
            return self.rows.mT @ self._solve(values)
        return self._solve(self.rows.mT @ values)

    def _solve(self, b: Tensor) -> Tensor:
        return torch.cholesky_solve(b[:, None], self._factor)[:, 0]

    def _scaled(self, values: Sequence[Tensor]) -> Tensor:
        flat = [root * each.reshape(-1) for root, each in zip(self._roots, values, strict=True)]
        return torch.cat(flat)

    def _has_all_of(self, g: Tensor) -> bool:
        """Return whether the residuals have a gradient, up to rounding."""
        rounding = torch.finfo(g.dtype).eps ** 0.5 * (self.rows.abs().mT @ self.values.abs())
        return bool(((self.rows.mT @ self.values - self._g).abs() <= rounding).all())


def _root(residuals: Residuals, weight: Tensor) -> Tensor:
    """Return the square root of the loss curvature for each residual, float64 ``[residuals]``."""
    curvature = residuals.hessian_product(torch.ones_like(residuals.output)).detach()
    return (weight * curvature.double()).sqrt().reshape(-1)
