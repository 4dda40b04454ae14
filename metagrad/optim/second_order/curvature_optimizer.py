"""The base class of optimizers with curvature, which read the graph of a loss before it is freed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from metagrad.autograd.checks.finite import is_finite
from metagrad.autograd.checks.lint import refuse_defects
from metagrad.autograd.derivatives.grad import refuse_complex
from metagrad.core._torch import averaging_wrapper
from metagrad.core.checks import check_count, check_function, refuse
from metagrad.core.dispatch import Dispatch
from metagrad.core.norms import every_order
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import widened
from metagrad.curvature.estimators.probes import Generators
from metagrad.curvature.likelihoods import KNOWN_LOSSES, OutputLoss, evaluate
from metagrad.distributed.exchange import is_average
from metagrad.optim.hyperparameters import check_hyperparameter
from metagrad.optim.torch_optim.optimizer import Group, ParameterGroups, RuleOptimizer, as_number


class WeightedLoss(NamedTuple):
    """A loss of known form within a total, and the derivative of the total with respect to it."""

    loss: OutputLoss
    weight: Tensor  # 0-d


class RecordedLoss(NamedTuple):
    """A computed loss of known form, and its node in the graph."""

    known: OutputLoss
    edge: GradientEdge  # not the tensor, which may be written to, as by loss /= 2

    @classmethod
    def of(cls, value: Tensor, known: OutputLoss | None) -> list[RecordedLoss]:
        """Return the record of a value, or no record if it has no graph or no known form."""
        return [] if known is None or not value.requires_grad else [cls(known, get_gradient_edge(value))]


class LossRecorder(Dispatch):
    """Redirects ``Tensor.backward``, and records the losses of known form that are computed.

    Args:
        backward: Called as ``backward(loss, gradient, retain_graph, create_graph, inputs)``.
        note_losses: Whether losses of known form are recorded in ``losses``, which keeps their graphs alive.
    """

    def __init__(self, backward: Any, *, note_losses: bool) -> None:
        known = KNOWN_LOSSES if note_losses else ()
        super().__init__({Tensor.backward: backward, **{loss: partial(self._noted, loss) for loss in known}})
        self.losses: list[RecordedLoss] = []

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call another function. Raise ``ValueError`` within a module that averages gradients."""
        if averaging_wrapper() is not None:
            raise ValueError(
                "opt.step(closure): the loss is computed by a DistributedDataParallel, which averages what a "
                "backward pass writes by itself, and no gradient or curvature that is taken here. Call the module in "
                "it, model.module."
            )
        return function(*args, **kwargs)

    def _noted(self, func: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if input.is_leaf:
            input = input.view_as(input)  # a parameter itself has no separate node in the graph
        evaluated = evaluate(lambda output, _: func(output, *args, **kwargs), input, ())
        self.losses += RecordedLoss.of(*evaluated)
        return evaluated.value


class BackwardPass(NamedTuple):
    """One call of ``backward``, whose graph is alive.

    Attributes:
        value: The scalar that is differentiated, without its graph.
        grads: Gradient of each leaf, with its graph if the optimizer ``differentiates_gradients``.
        losses: Losses of known form in the loss, if the optimizer ``notes_losses``.
        retain_graph: True if another backward pass follows.
        loss: The tensor of the closure.
    """

    value: Tensor
    grads: Mapping[Tensor, Tensor]
    losses: Sequence[WeightedLoss]
    retain_graph: bool = False
    loss: weakref.ref[Tensor] | None = None


def scalar_of(loss: Tensor, gradient: Tensor | None) -> Tensor:
    """Return the scalar that ``loss.backward(gradient)`` differentiates."""
    return widened(loss.reshape(()) if gradient is None else (loss * gradient).sum()).detach()


def options_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of every group among the arguments of a constructor (its ``locals()``)."""
    return {k: v for k, v in arguments.items() if k not in ("self", "model", "params", "__class__")}


def leaves_behind(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose ``.grad`` a backward pass of a loss would write."""
    if loss.grad_fn is None:
        return [loss]
    accumulates = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)
    return [node.variable for node in graph_nodes([loss]) if isinstance(node, accumulates)]  # type: ignore[attr-defined]


class CurvatureOptimizer(RuleOptimizer):
    """An optimizer that computes curvature while the graph of a loss is alive.

    A closure of the usual form works unchanged. While it runs, ``Tensor.backward`` is redirected to the optimizer.
    The optimizer computes a gradient with a graph, computes the curvature from this graph, adds the gradient to
    ``.grad`` and frees the graph. Without a closure, use ``opt.backward(loss)``, or ``with opt.recording():`` around
    the computation of the loss and its ``backward``. The curvature of several backward passes adds up, as their
    gradients do, until a step, ``opt.zero_grad()``, or gradients that are set to None. At steps that need no
    curvature, ``backward`` is torch's own.

    Not supported:

    - ``torch.compile`` of the model, if the optimizer needs second derivatives.
    - fused attention kernels without a closure or ``recording``, because they have no second derivative.
    - DistributedDataParallel in a closure, and gradients that are averaged over processes.
    - hooks on a parameter, because they also receive Hessian-vector products.

    With a ``GradScaler``, call ``opt.backward(scaler.scale(loss))`` and ``scaler.step(opt)``. Gradients and curvature
    are unscaled, and an overflow skips the step. If you call ``scaler.unscale_(opt)`` before the step, to clip
    gradients, use ``opt.backward(loss, scaler=scaler)``, which stores the scale. For an optimizer that needs the
    form of the loss, compute the loss within ``with opt.recording():``.

    A subclass computes its curvature in ``_observe``, and drops it in ``_forget``.
    """

    fractions: ClassVar[Sequence[str]] = ("betas", "decay")
    """The hyperparameters that must be below 1."""
    counts: ClassVar[Sequence[str]] = ()
    """The options that are whole numbers of at least 1."""
    options_alone: ClassVar[Sequence[str]] = ("maximize", "nonfinite", "seed", "step")
    """The entries of a group that are not numbers."""
    notes_losses = False
    """Whether the losses of known form that a closure computes are recorded."""
    differentiates_twice = True
    """Whether second derivatives are taken, so that graphs in which they are wrong raise an error."""
    differentiates_gradients = True
    """True if gradients are differentiated, which then keep their graph. False if outputs are differentiated."""
    _step_supports_amp_scaling = True  # GradScaler then leaves gradients as they are, and tells their scale.
    _noted: list[RecordedLoss] | None = None  # the losses computed while recording
    grad_scale: Tensor | None  # set by GradScaler for the duration of a step
    found_inf: Tensor

    def _initialize(self, params: ParameterGroups, defaults: dict[str, Any]) -> None:
        self._forget()
        if defaults.get("seed", 0) is None:
            defaults = {**defaults, "seed": torch.initial_seed()}
        super()._initialize(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        super().__setstate__(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and forget the curvature taken with them."""
        super().zero_grad(set_to_none)
        self._forget()

    def backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        *,
        retain_graph: bool | None = None,
        inputs: Tensor | Sequence[Tensor] | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Add the gradient of a loss to ``.grad`` as ``loss.backward()`` does, and compute the curvature.

        Args:
            loss: A tensor, with its graph.
            gradient: The gradient of a loss with several elements, as in ``Tensor.backward``.
            retain_graph: Keep the graph for another backward pass.
            inputs: Leaves whose ``.grad`` is written. By default, every leaf that the loss depends on.
            scaler: Scales the loss, which is given without its scale.

        Raises:
            ValueError: The loss is complex, or an input is no leaf.
        """
        if scaler is not None:
            self._scale = scaler.scale(torch.ones((), device=loss.device))  # type: ignore[assignment]
            loss = scaler.scale(loss)  # type: ignore[assignment]
        if self._is_curvature_due():
            self._backward_with_curvature(loss, gradient, retain_graph, inputs=inputs)
        else:
            self._begin_pass(loss)
            loss.backward(gradient, retain_graph, inputs=inputs)

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """Redirect every ``Tensor.backward`` inside to the optimizer, as a closure does."""
        if not self._is_curvature_due():
            yield
            return
        mode = LossRecorder(self._backward_with_curvature, note_losses=self.notes_losses)
        self._noted = mode.losses
        try:
            with every_order() if self.differentiates_twice else contextlib.nullcontext(), mode:
                yield
        except BaseException:
            self._forget()
            raise
        finally:
            mode.losses.clear()
            self._noted = None

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{type(self).__name__}.step(closure): GradScaler takes no closure. Call "
                "opt.backward(scaler.scale(loss)), then scaler.step(opt)."
            )
        check_function(f"{type(self).__name__}.step(closure)", "closure", closure)
        with torch.enable_grad(), self.recording():
            return closure()

    def _move(self) -> None:
        self._refuse_averaged()
        if not hasattr(self, "found_inf") or self._unscaled():
            super()._move()

    def _refuse_averaged(self) -> None:
        """Raise ``ValueError`` for gradients of several processes with the curvature of one process."""
        if any(is_average(p.grad) for group in self.param_groups for p in group["params"]):
            raise ValueError(
                f"{type(self).__name__}.step: the gradients are means over several processes, and the curvature is "
                "that of this process, so the parameters of the processes would drift apart. Use an optimizer that "
                "takes gradients alone."
            )

    def _unscaled(self) -> bool:
        """Unscale the gradients of a GradScaler, and return whether all are finite."""
        if float(self.found_inf) > 0:
            return False
        if self.grad_scale is not None:
            self._scale = self.grad_scale
            for p in self._all_params():
                if p.grad is not None:
                    p.grad.mul_(self._scale.double().reciprocal().to(p.device, torch.float32))
        return True

    def _inverse_scale(self) -> float:
        """Return the inverse of the scale of a GradScaler."""
        if not hasattr(self, "found_inf"):
            return 1.0
        if self._scale is None:
            raise RuntimeError(
                f"{type(self).__name__}.step: scaler.unscale_(opt) took the scale off the gradients, and that of the "
                "curvature is not known. Call opt.backward(loss, scaler=scaler) in place of "
                "opt.backward(scaler.scale(loss))."
            )
        return 1 / float(self._scale)

    def _begin_pass(self, loss: Tensor) -> None:
        """Note a loss, and drop losses whose gradients were dropped, as by ``model.zero_grad()``."""
        refuse_complex(f"{type(self).__name__}.backward(loss)", loss)
        is_first = all(p.grad is None for p in self._all_params())
        self._losses = [*([] if is_first else self._losses), loss.detach()]

    def _is_curvature_due(self) -> bool:
        """Return whether this step computes curvature."""
        return any(map(self._is_due, self.param_groups))

    def _is_due(self, group: Group) -> bool:
        return group["step"] % group.get("curvature_every", 1) == 0

    def _backward_with_curvature(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        self._begin_pass(loss)
        given = [inputs] if isinstance(inputs, Tensor) else inputs
        leaves = leaves_behind(loss) if given is None else list(given)
        if not all(leaf.is_leaf for leaf in leaves):
            refuse(
                f"{type(self).__name__}.backward(loss, inputs)",
                "leaves of the graph",
                "an intermediate tensor",
            )
        if self.differentiates_twice and "_is_linted" not in self.__dict__:
            refuse_defects(f"{type(self).__name__}.backward(loss)", loss, leaves)
            self._is_linted = True
        keeps = self.differentiates_twice and self.differentiates_gradients
        found = torch.autograd.grad(
            loss, leaves, gradient, create_graph=keeps, retain_graph=True, allow_unused=True
        )
        grads = {leaf: g for leaf, g in zip(leaves, found, strict=True) if g is not None}
        losses = _weighted(loss, gradient, self._noted or ())
        outputs = [part.loss.output.detach() for part in losses]
        if is_finite(outputs):
            if self.notes_losses and not losses and not grads.keys().isdisjoint(self._all_params()):
                raise ValueError(unknown_loss(type(self).__name__))
            value = scalar_of(loss, gradient)
            self._observe(BackwardPass(value, grads, losses, bool(retain_graph), weakref.ref(loss)))
        else:  # labels cannot be sampled from NaN, and the step is skipped
            self._losses = [*self._losses, *outputs]
        with torch.no_grad():
            for leaf, g in grads.items():
                accumulator: Any = get_gradient_edge(leaf).node  # adds to .grad as a backward pass does
                accumulator(g.detach())

    def _observe(self, graph: BackwardPass) -> None:
        """Compute the curvature from a graph, and add it to the results since the last step."""
        raise NotImplementedError

    def _forget(self) -> None:
        super()._forget()
        self._scale: Tensor | None = None

    def _without_curvature(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__}.step: there are gradients, but no curvature: loss.backward() outside of a "
            "closure gives none. Call opt.step(closure), where closure computes the loss, calls loss.backward() and "
            "returns it; or, where a step does not look at the loss again, opt.backward(loss) in place of "
            "loss.backward()."
        )

    def _rule(self, group: Group) -> None:
        """Raise for numbers that are out of their range, which a scheduler may have set."""
        call = f"{type(self).__name__}(params)"
        for name in (self.defaults.keys() & group.keys()) - {*self.options_alone, *self.counts}:
            values, below = group[name], 1.0 if name in self.fractions else torch.inf
            several = isinstance(values, (tuple, list))
            for index, value in enumerate(values if several else [values]):
                if value is not None and not isinstance(value, (bool, str)):
                    key = f"{name}[{index}]" if several else name
                    check_hyperparameter(call, key, as_number(value), below=below)
        for name in self.counts:
            check_count(f"{call}, {name}", group[name])


def unknown_loss(name: str) -> str:
    """Return the error message that no recorded loss has a known form."""
    *others, last = (f"F.{function.__name__}" for function in KNOWN_LOSSES)
    return (
        f"{name}: the loss contains none whose curvature in the output is known. Compute it inside the closure, or "
        f"within `with opt.recording():`, by {', '.join(others)} or {last}, reduced to a mean or a sum; "
        "residuals r by F.mse_loss(r, torch.zeros_like(r)), or a likelihood written by hand by "
        "opt.output_loss(loss_fn, output), of which GaussNewton takes the Hessian."
    )


def _weighted(loss: Tensor, gradient: Tensor | None, parts: Sequence[RecordedLoss]) -> list[WeightedLoss]:
    """Return the losses that a loss contains, and its derivative with respect to each."""
    if not parts:
        return []
    edges = [part.edge for part in parts]
    weights = torch.autograd.grad(loss, edges, gradient, retain_graph=True, allow_unused=True)
    pairs = zip(parts, weights, strict=True)
    return [WeightedLoss(part.known, weight) for part, weight in pairs if weight is not None]


def label_gradients(
    losses: Sequence[WeightedLoss],
    params: Sequence[Tensor],
    generators: Generators,
    samples: int = 1,
    *,
    retain_graph: bool,
) -> Iterator[tuple[Tensor, tuple[Tensor | None, ...]]]:
    """Yield the sign of the weight of each loss, and the gradients of the loss for labels drawn from the model."""
    last = samples * len(losses) - 1
    for index in range(last + 1):
        loss, weight = losses[index % len(losses)]
        score = (weight.abs().sqrt() * loss.score(generators[loss.output.device])).detach()
        keep = retain_graph or index < last
        found = torch.autograd.grad(loss.output, params, score, retain_graph=keep, allow_unused=True)
        yield weight.sign(), found
