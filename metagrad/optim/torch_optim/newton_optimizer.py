"""The base class of ``torch.optim`` optimizers whose rule treats all parameters as one vector."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from metagrad.autograd.derivatives.graph_vjp import graph_vjp
from metagrad.core.capture import RandomState
from metagrad.core.tree import widened
from metagrad.curvature import Result
from metagrad.curvature.likelihoods.output_losses import OutputLoss
from metagrad.distributed.averaged import Mean
from metagrad.optim.curvature import needs_curvature
from metagrad.optim.newton.second_order import check_uniform, endings
from metagrad.optim.probes import Generators
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import WeightedLoss
from metagrad.optim.torch_optim.closure_objective import (
    BackwardPass,
    ClosureObjective,
    GraphCurvature,
    KnownPart,
    ModuleBuffers,
    scalar_of,
    without_gradients,
)
from metagrad.optim.torch_optim.curvature_optimizer import (
    SEED,
    CurvatureOptimizer,
    NotedLoss,
    leaves_behind,
    unknown_loss,
)
from metagrad.optim.torch_optim.move import Change
from metagrad.optim.torch_optim.optimizer import GROUP, NONFINITE, Group, Option, Work, as_number
from metagrad.optim.torch_optim.state import apart, joined


class WrittenLoss(OutputLoss):
    r"""A loss of an output :math:`z`, given as a function; each product with its Hessian differentiates it.

    The distribution of which it is the likelihood is not known, so there is no Fisher matrix.

    Args:
        loss_fn: An output to a loss of one element.
        output: :math:`z`, on the tape of the model.

    Example:
        >>> from metagrad.optim.torch_optim.newton_optimizer import WrittenLoss
        >>> loss = WrittenLoss(lambda z: (z**3).sum(), torch.tensor([1.0, 2.0]))
        >>> loss.hessian_product(torch.ones(2))
        tensor([ 6., 12.])
    """

    def __init__(self, loss_fn: Callable[[Tensor], Tensor], output: Tensor) -> None:
        self._loss_fn = loss_fn
        self.output = output
        self.scale = output.new_ones(())
        self.count = None

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Hessian."""
        with torch.enable_grad():
            z = self.output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._loss_fn(z), z, create_graph=True)
            (product,) = graph_vjp([gradient], [z], [vectors])
        return torch.zeros_like(z) if product is None else product

    def fisher_product(self, vectors: Tensor) -> NoReturn:
        """Refuse."""
        self._refuse("Fisher matrix", "Use GaussNewton, whose matrix it is where z are natural parameters")

    def score(self, generator: torch.Generator | None) -> NoReturn:
        """Refuse."""
        self._refuse("distribution of labels", "Set preconditioner=None")

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"output_loss(loss_fn, output): of a loss written by hand, the {what} is not known. {remedy}."
        )


FRACTION = Option(
    1.0,
    "The part of the data whose curvature is taken, above 0: the closure is called as ``closure(fraction=...)`` for "
    "it. 1 takes the curvature of all data.",
    "float",
)


MINIBATCH_OPTIONS: Mapping[str, Option] = {
    "curvature_fraction": FRACTION,
    "nonfinite": NONFINITE,
    "seed": SEED,
    "group": GROUP,
}
"""Those of an optimizer whose products may be of fewer data than its gradients."""


class NewtonOptimizer(CurvatureOptimizer):
    r"""An optimizer whose rule multiplies with the curvature of a loss, and evaluates the loss again after a step.

    The closure is called once for gradient and curvature, with its graph, and then for the loss alone, as often as
    the rule asks: there ``backward`` does nothing (of L-BFGS it computes the gradients of the line search), ``.grad``
    is afterwards what the first call left, random numbers (dropout) are those of the first call, and buffers of
    modules (running statistics of BatchNorm) are put back. What else a closure counts or writes, it does at every
    call. Losses of several backward passes add up.

    Products with the curvature are what a step costs, and need fewer data than the gradient does. Where an optimizer
    has a ``curvature_fraction`` below 1, gradient and loss are those of all data, and the curvature that of a part:
    for it, the closure is called once more, as ``closure(fraction=0.25)``. It computes the mean over that part of
    the examples, the first ones or any others::

        def closure(fraction=1.0):
            opt.zero_grad()
            num_examples = round(fraction * len(x))
            loss = F.cross_entropy(model(x[:num_examples]), y[:num_examples])
            loss.backward()
            return loss

    ``opt.step(closure, curvature=part)`` takes the curvature from another closure, whatever the fraction is. Steps
    that multiply with nothing, because of ``curvature_every``, call neither.

    All groups make one vector: one direction :math:`d` by one matrix, one length, one ratio of reduction. The step of
    a group is :math:`\eta d` with the step size of its own, and it has a damping and a weight decay of its own;
    everything else is of all of them, and must agree. Where such a step would climb, all groups take the least step
    size; a group whose step size is 0 stays where it is, and the direction is that of the others.

    Weight decay :math:`\gamma` is of the objective, which is the loss with :math:`\gamma |w|^2 / 2`: it enters
    gradient, matrix and ratio. What ``step`` returns is the loss alone.

    Of several processes, ``group``, each has the loss of its own examples, and the closure averages the gradients::

        def closure():
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            metagrad.distributed.average_gradients(model, weight=len(x))
            return loss

    The objective is then the mean of the losses with these weights, of which a step is that of one process with all
    examples: its products, and its values and gradients at other parameters, are averaged as they are computed. All
    processes call their closures equally often; what ``step`` returns is the loss of this one. A closure of a part of
    the data averages with weights of its own. Labels that are drawn, for a preconditioner, are those of each.

    With a ``GradScaler`` there is no closure, hence nothing to adapt by: ``adapt=False`` (or ``line_search_fn=None``)
    and ``opt.backward(scaler.scale(loss))``, ``scaler.step(opt)``; gradients and curvature are unscaled. If
    ``scaler.unscale_(opt)`` is called before, to clip gradients: ``opt.backward(loss, scaler=scaler)``.
    """

    elementwise = False
    options: ClassVar[Mapping[str, Option]] = {"nonfinite": NONFINITE, "group": GROUP}
    adapted: ClassVar[str | None] = None
    """The hyper-parameter that the state of the rule has a factor of."""
    implied: ClassVar[tuple[str, ...]] = ()
    """The slots of the state that are finite where the other ones are."""
    whole: ClassVar[str] = "newton"
    """What the direction of an undisturbed step is called."""

    @property
    def stats(self) -> dict[str, float | int | str]:
        """What the last step did.

        - ``steps`` and ``products`` of the inner solver, 0 at a step without a solve. Probes for a preconditioner
          count as products. Of L-BFGS, ``steps`` are the gradients of the line search.
        - ``ending`` of the solver, a name of :class:`metagrad.curvature.Result`, or ``NONE``.
        - ``ratio`` of the reductions of loss and model; NaN where the loss was not evaluated.
        - ``damping`` (``radius``, ``cubic``) of the next step, in the first group.
        - ``length`` of the step in units of its direction, by the largest step size.
        - ``direction``: ``newton``, ``natural_gradient``, ``quasi_newton``, ``negative_curvature``, ``boundary``, or
          ``none`` where nothing moved.
        - ``skipped``, as of all optimizers, also before the first step.
        """
        last = self.__dict__.get("_last")
        return {**({} if last is None else self._described(*last)), **super().stats}

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
            TypeError: ``curvature_fraction`` is below 1, and ``closure`` takes no argument ``fraction``.
        """
        if curvature is not None and closure is None:
            raise ValueError(
                f"{type(self).__name__}.step(curvature=...): there is no closure. Call opt.step(closure, "
                "curvature=...), with closures of all the data and of a part of them."
            )
        self._closure, self._curvature_closure, self._buffers = closure, curvature, ModuleBuffers()
        try:
            return super().step(closure)
        finally:
            self._closure, self._curvature_closure, self._buffers = None, None, ModuleBuffers()

    def output_loss(self, loss_fn: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        r"""Compute a loss of the output of a model such that its curvature in the output is known.

        What :class:`GaussNewton` recognises by itself (``F.cross_entropy``, ``F.mse_loss``, ...) needs no such call:
        it is for a likelihood written by hand, in the closure or within ``with opt.recording():``.

        Args:
            loss_fn: An output to its loss, of one element; called again for every product, with the same output.
                Convex, for the matrix to have no negative curvature.
            output: What the model returned, of any shape.

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
        if not self.notes_losses or not isinstance(self._noted, list):
            return loss_fn(output)
        own, count = output.view_as(output), len(self._noted)  # with a place of its own in the graph
        value = loss_fn(own)
        self._noted[count:] = NotedLoss.of(value, WrittenLoss(loss_fn, own))  # not what it is made of, too
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and forget the curvature taken with them."""
        if not self.__dict__.get("_is_moving"):
            super().zero_grad(set_to_none)

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        check_fraction(type(self).__name__, self._fraction(self.param_groups[index]))
        self._check_agreement(index)
        self._check_dtypes()

    def _check_agreement(self, index: int) -> None:
        """Refuse a group with another value of what there is one of for all groups."""
        first, group = self.param_groups[0], self.param_groups[index]
        own = self._rule(first).by_parameter
        for option in self.defaults:
            values = [
                as_number(one.get(option)) for one in (first, group)
            ]  # groups that were loaded lack torch's own
            if option in (*own, "step") or values[0] == values[1]:
                continue
            raise ValueError(
                f"{type(self).__name__}(params): all groups make one step, whose {option} must be one, got "
                f"{option}={values[0]} in group 0 and {values[1]} in group {index}. Only "
                f"{', '.join(name for name in own if name in self.defaults)} may differ; else give each group an "
                "optimizer of its own."
            )

    def _check_dtypes(self) -> None:
        params = {key: widened(p) for key, (_, p) in self._groups_by_name().items() if p.requires_grad}
        check_uniform(f"{type(self).__name__}(params)", params)

    def _fraction(self, group: Group) -> float:
        return float(group.get("curvature_fraction", 1.0))

    def _is_multiplying(self) -> bool:
        """Say whether this step takes products."""
        group = self.param_groups[0]
        return self._rule(group).multiplies(group["step"])

    def _keeps_graph(self) -> bool:
        return super()._keeps_graph() and self._is_multiplying()

    def _evaluated(self, closure: Callable[..., Any]) -> Any:
        self._random = RandomState()
        fraction, part = self._fraction(self.param_groups[0]), self._curvature_closure
        if part is None and fraction < 1 and self._is_multiplying():
            check_takes_fraction(type(self).__name__, closure, fraction)
            part = functools.partial(closure, fraction=fraction)
        with self._buffers.noticed():
            result = super()._evaluated(closure)
        if part is not None and self._is_multiplying():
            self._curved = self._passes_of(part)
        return result

    def _passes_of(self, closure: Callable[[], Any]) -> tuple[list[BackwardPass] | None, Mean]:
        """Return the backward passes of another closure, of which nothing else is kept, and the mean they enter."""
        kept, self._passes, self._is_moving = self._passes, None, True
        try:
            with without_gradients(self._all_params()), self._buffers.kept():
                super()._evaluated(closure)
                return self._passes, self._mean()
        finally:
            self._passes, self._is_moving = kept, False

    def _backward_with_curvature(
        self,
        loss: Tensor,
        gradient: Tensor | None,
        retain_graph: bool | None,
        inputs: Tensor | Sequence[Tensor] | None,
    ) -> None:
        self._value = scalar_of(loss, gradient).detach()
        super()._backward_with_curvature(loss, gradient, retain_graph, inputs)

    def _observe(
        self, grads: Mapping[Tensor, Tensor], losses: Sequence[WeightedLoss], *, retain_graph: bool
    ) -> None:
        if self.notes_losses and not losses:
            raise ValueError(unknown_loss(type(self).__name__))
        parts = [KnownPart(loss, frozenset(leaves_behind(loss.loss.output))) for loss in losses]
        before, params = self._passes or [], self._all_params()
        if all(p.grad is None for p in params):  # those of earlier passes were dropped
            before = [one for one in before if one.grads.keys().isdisjoint(params)]
        self._passes = [*before, BackwardPass(self._value, grads, parts)]

    def _forget(self) -> None:
        super()._forget()
        self._passes: list[BackwardPass] | None = None
        self._curved: tuple[list[BackwardPass] | None, Mean] | None = None

    def _mean(self) -> Mean:
        """Return the mean over processes that the gradients are, as loss and curvature are to be."""
        if self.group is None:
            return Mean()
        named = self._groups_by_name().items()
        shares = {self._share_in(key, p) for key, (_, p) in named if p.grad is not None}
        if len(shares) > 1:
            raise ValueError(
                f"{type(self).__name__}.step: all gradients are of one loss, which has one weight in each process, "
                f"but they were averaged with several: those of this process are {sorted(shares)} of the sum. Call "
                "metagrad.distributed.average_gradients once, for all parameters."
            )
        return Mean(max(shares, default=1.0), self.group)

    def _groups_by_name(self) -> dict[str, tuple[Group, Tensor]]:
        """Return every parameter with its group; a name that two groups have is made longer."""
        found: dict[str, tuple[Group, Tensor]] = {}
        for index, group in enumerate(self.param_groups):
            for key, p in self._named(index).items():
                found[f"param_groups[{index}]: {key}" if key in found else key] = (group, p)
        return found

    def _rule_of_all(self, params: Params) -> Any:
        """Make one rule of all groups; hyper-parameters that differ are by the names of the parameters that move."""
        rule, named = self._rule(self.param_groups[0]), self._groups_by_name()
        differing = [
            name
            for name in rule.by_parameter
            if name in self.defaults and len({as_number(group[name]) for group in self.param_groups}) > 1
        ]
        by_name = {name: {key: as_number(named[key][0][name]) for key in params} for name in differing}
        return dataclasses.replace(rule, **by_name) if by_name else rule

    def _curvature(self, group: Group, params: Params, grads: Params) -> Any:
        name = type(self).__name__
        if not needs_curvature(self._rule(group), group["step"]):
            return None
        mean = self._mean()
        if self._passes is None and mean.share:
            raise self._without_curvature()
        generators, fraction = self._generators(draws_labels=self.notes_losses), self._fraction(group)
        if self._closure is not None:
            return self._objective(params, generators)
        option = next((o for o in ("adapt", "line_search_fn") if group.get(o)), None)
        if option is not None:
            raise RuntimeError(
                f"{name}.step: {option}={group[option]!r} looks at the loss at other parameters, for which it is to "
                f"be computed again. Call opt.step(closure), or set {option}={False if option == 'adapt' else None}."
            )
        if fraction < 1:
            raise RuntimeError(
                f"{name}.step: curvature_fraction={fraction:g} takes the curvature of a part of the data, for which "
                "a closure is called. Call opt.step(closure), or set curvature_fraction=1."
            )
        return GraphCurvature(
            params,
            self._passes or [],
            inverse_scale=self._inverse_scale(),
            mean=mean,
            generators=generators,
        )

    def _objective(
        self, params: Params, generators: Generators, every: Sequence[Tensor] | None = None
    ) -> ClosureObjective:
        """Return the loss of the closure, here and at other parameters; ``every`` adds to what has gradients."""
        assert self._closure is not None
        mean = self._mean()
        passes = self._passes or []
        curved, curved_mean = (passes, mean) if self._curved is None else self._curved
        if curved is None and curved_mean.share:
            raise RuntimeError(
                f"{type(self).__name__}.step: the closure that the curvature is taken of calls no backward. Call "
                "loss.backward() in it, as in the closure of all data."
            )
        return ClosureObjective(
            params,
            passes,
            curved or [],
            self._closure,
            self._all_params() if every is None else every,
            self._random,
            self._buffers,
            mean=mean,
            curved_mean=curved_mean,
            generators=generators,
        )

    def _inverse_scale(self) -> float:
        if not hasattr(self, "found_inf"):
            return 1.0
        return 1 / float(self._known_scale("curvature"))

    def _move(self) -> None:
        """Move all groups together; or none, if anything is not finite."""
        step = self.param_groups[0]["step"]
        self._is_moving, self._found = True, None
        try:
            super()._move()
        finally:
            self._is_moving = False
        if self.param_groups[0]["step"] > step:
            self._last = self._found

    def _all_work(self) -> list[Work]:
        params = {key: p for key, (_, p) in self._groups_by_name().items()}
        return [self._work(self.param_groups[0], params)]

    def _changes(self, work: Work) -> Iterator[Change]:
        grads = {key: widened(g) for key, g in work.grads.items()}
        change, self._found = self._changed(work.params, grads)
        yield change

    def _changed(self, params: Params, grads: Params) -> tuple[Change, tuple[Any, str]]:
        """Return the new values of all parameters after a step, with its report and the name of its direction."""
        for index in range(1, len(self.param_groups)):
            self._check_agreement(index)
        group, rule = self.param_groups[0], self._rule_of_all(params)
        values = {key: widened(p) for key, p in params.items()}
        state, curvature = self._joined(group, rule, params, values), self._curvature(group, params, grads)
        whole = self.whole if rule.multiplies(group["step"]) else "quasi_newton"
        moved, state = self._updated(rule, grads, state, values, curvature)
        used = {"the curvature": curvature.total} if isinstance(curvature, GraphCurvature) else {}
        states = apart(state._replace(report=None), params)
        return Change(params, moved, states, used=used, implied=self.implied), (state, whole)

    def _updated(
        self, rule: Any, grads: Params, state: Any, values: Params, curvature: Any
    ) -> tuple[Params, Any]:
        """Return what the rule makes of parameters and state."""
        return rule.update(grads, state, values, curvature)

    def _joined(self, group: Group, rule: Any, params: Params, values: Params) -> Any:
        """Put the state of a rule together; a group that a parameter joins, or comes back to, begins anew."""
        states = {key: self.state.get(p, {}) for key, p in params.items()}
        steps = {state.get("step") for state in states.values()}
        is_known = len(steps) == 1
        state = joined(rule, states if is_known else {key: {} for key in params}, values)
        # The number of the group's step has decided what the closure was called for.
        return state if group.get("curvature_every", 1) == 1 else state._replace(step=group["step"])

    def _described(self, state: Any, whole: Any, /) -> dict[str, float | int | str]:
        report, ending = state.report, endings(state.report)[0]
        named = {Result.NEGATIVE_CURVATURE.name: "negative_curvature", Result.BOUNDARY.name: "boundary"}
        length = float(report.length)
        found: dict[str, float | int | str] = {
            "steps": int(report.steps),
            "products": int(report.products),
            "ending": ending,
            "ratio": float(report.ratio),
            "length": length,
            "direction": "none" if length == 0 else named.get(ending) or whole,
        }
        if self.adapted is not None:
            factor, added = float(getattr(state, "factor", 1.0)), float(getattr(state, "added", 0.0))
            found[self.adapted] = float(self.param_groups[0][self.adapted]) * factor + added
        return found


def check_fraction(name: str, fraction: float) -> None:
    """Refuse what is no part of the data; ``name`` is that of the optimizer."""
    if not 0 < fraction <= 1:
        raise ValueError(f"{name}(params): curvature_fraction must be above 0 and at most 1, got {fraction}.")


def check_takes_fraction(name: str, closure: Callable[..., object], fraction: float) -> None:
    """Refuse a closure that cannot be called as ``closure(fraction=...)``, before it is called at all."""
    try:
        inspect.signature(closure).bind(fraction=fraction)
    except TypeError as error:
        raise TypeError(
            f"{name}.step(closure): curvature_fraction={fraction:g} calls closure(fraction={fraction:g}) for the "
            f"curvature of a part of the data, and closure does not take that: {error}. Write "
            "`def closure(fraction=1.0):`, with the loss of the first round(fraction * len(x)) examples; or call "
            "opt.step(closure, curvature=part), with a closure of the part."
        ) from None
