"""What makes a ``torch.optim.Optimizer`` of a rule that uses curvature."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from metagrad.autograd.checks.finite import is_finite
from metagrad.autograd.checks.lint import refuse_defects
from metagrad.autograd.derivatives.grad import refuse_complex
from metagrad.curvature.likelihoods.recognition import Evaluated
from metagrad.optim.curvature import needs_curvature
from metagrad.optim.tape_curvature import WeightedLoss
from metagrad.optim.torch_optim.gradients import Recording, accumulate, leaves_behind, weights_of
from metagrad.optim.torch_optim.optimizer import Option, ParameterGroups, RuleOptimizer

SEED = Option(
    None,
    "Of the random numbers: those of a step follow from it and the number of the step. None takes "
    "``torch.initial_seed()``.",
)


class CurvatureOptimizer(RuleOptimizer):
    """An optimizer whose rule asks for curvature, which it takes while the graph of a loss is there.

    A closure of the usual form works unchanged: while it runs, ``Tensor.backward`` is handed to the optimizer, which
    takes a gradient that keeps its graph, observes what the rule asks for, adds the gradient to ``.grad`` and lets
    go of the graph. Nothing is patched, and no graph outlives the step. Without a closure, ``opt.backward(loss)``
    does that, or ``with opt.recording():`` around the computation of the loss and its ``backward``. What several
    backward passes give adds up, as their gradients do, until a step is taken or gradients are set to zero. At steps
    whose rule needs no curvature, nothing of this happens.

    What does not work: ``torch.compile`` of the model and fused attention kernels, which cannot be differentiated
    twice; DistributedDataParallel, whose reduction does not see the gradients; and hooks on a parameter, which see
    the products with the Hessian too.

    With a ``GradScaler``: ``opt.backward(scaler.scale(loss))``, ``scaler.step(opt)``; gradients and curvature are
    unscaled, and an overflow skips the step. If ``scaler.unscale_(opt)`` is called before, to clip gradients, the
    scale of the curvature is not to be seen any more: ``opt.backward(loss, scaler=scaler)`` keeps it. An optimizer
    that needs to know the form of the loss is told of it within ``with opt.recording():``.

    A subclass says what it observes of a graph in ``_observe``, forgets it in ``_forget``, and gives the rule what it
    has seen in ``_curvature``.
    """

    options: ClassVar[Mapping[str, Option]] = {**RuleOptimizer.options, "seed": SEED}
    notes_losses = False
    """Whether the losses that a closure computes are noted, of which the Gauss-Newton matrix is made."""
    differentiates_twice = True
    """Whether derivatives of derivatives are taken, so that graphs in which they are wrong are refused."""
    differentiates_gradients = True
    """Whether those are of gradients, which are then taken with their graph; else they are of outputs."""
    _step_supports_amp_scaling = True  # GradScaler then leaves gradients as they are, and tells their scale.
    _noted: Sequence[Evaluated] = ()  # the losses computed while recording
    grad_scale: Tensor | None  # set by GradScaler for the duration of a step
    found_inf: Tensor

    def _initialize(self, params: ParameterGroups, defaults: dict[str, Any]) -> None:
        self._forget()
        seed = defaults.get("seed")
        super()._initialize(params, {**defaults, "seed": torch.initial_seed() if seed is None else seed})

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
        """Add the gradient of a loss to ``.grad`` as ``loss.backward()`` does, and take what the rule needs.

        Args:
            loss: A tensor, with its graph.
            gradient: As for ``Tensor.backward``, of a loss of several elements.
            retain_graph: Keep the graph for another backward pass.
            inputs: Whose ``.grad`` to write; by default, those of all that the loss depends on.
            scaler: Scales the loss, which is given without its scale.

        Raises:
            ValueError: The loss is complex.
        """
        refuse_complex(f"{type(self).__name__}.backward(loss)", loss)
        if scaler is not None:
            self._scale = scaler.scale(torch.ones((), device=loss.device))  # type: ignore[assignment]
            loss = scaler.scale(loss)  # type: ignore[assignment]
        if self._is_curvature_due():
            self._backward_with_curvature(loss, gradient, retain_graph, inputs)
        else:
            self._losses = [*self._losses, loss.detach()]
            loss.backward(gradient, retain_graph, inputs=inputs)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Hand every ``Tensor.backward`` inside to the optimizer, as a closure does for its duration."""
        if not self._is_curvature_due():
            yield
            return

        def backward(loss, gradient=None, retain_graph=None, create_graph=False, inputs=None):
            refuse_complex(f"{type(self).__name__}.backward(loss)", loss)
            self._asked_for_graph = self._asked_for_graph or create_graph
            self._backward_with_curvature(loss, gradient, retain_graph, inputs)

        mode = Recording(backward, note_losses=self.notes_losses)
        self._noted = mode.losses
        try:
            with mode:
                yield
        except BaseException:
            self._forget()
            raise
        finally:
            mode.losses.clear()
            self._noted = ()

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{type(self).__name__}.step(closure): GradScaler takes no closure. Call "
                "opt.backward(scaler.scale(loss)), then scaler.step(opt)."
            )
        with torch.enable_grad(), self.recording():
            return closure()

    def _move(self) -> None:
        try:
            super()._move()
        finally:
            self._forget()

    def _is_curvature_due(self) -> bool:
        return any(needs_curvature(self._rule(group), group["step"]) for group in self.param_groups)

    def _backward_with_curvature(
        self,
        loss: Tensor,
        gradient: Tensor | None,
        retain_graph: bool | None,
        inputs: Tensor | Sequence[Tensor] | None,
    ) -> None:
        leaves = leaves_behind(loss) if inputs is None else _as_list(inputs)
        if self.differentiates_twice and "_is_linted" not in self.__dict__:
            refuse_defects(f"{type(self).__name__}.backward(loss)", loss, leaves)
            self._is_linted = True
        found = torch.autograd.grad(
            loss,
            leaves,
            gradient,
            create_graph=self._keeps_graph(),
            retain_graph=True,
            allow_unused=True,
        )
        grads = {leaf: g for leaf, g in zip(leaves, found, strict=True) if g is not None}
        weights = weights_of(loss, gradient, [evaluated.value for evaluated in self._noted])
        losses = [
            WeightedLoss(evaluated.known, weight)
            for evaluated, weight in zip(self._noted, weights, strict=True)
            if weight is not None and evaluated.known is not None
        ]
        self._losses = [*self._losses, loss.detach()]
        outputs = [part.loss.output.detach() for part in losses]
        if is_finite(outputs):
            self._observe(grads, losses, retain_graph=bool(retain_graph))
        else:  # no labels can be drawn from NaN, and the step will not be taken
            self._losses = [*self._losses, *outputs]
        for leaf, g in grads.items():
            accumulate(leaf, g)

    def _keeps_graph(self) -> bool:
        """Say whether the gradient of this step is taken with its graph."""
        return self.differentiates_twice and self.differentiates_gradients

    def _observe(
        self, grads: Mapping[Tensor, Tensor], losses: Sequence[WeightedLoss], *, retain_graph: bool
    ) -> None:
        """Take what the rule needs of a graph, in addition to what was taken since the last step.

        Args:
            grads: The gradient of each leaf, with its graph if ``_keeps_graph()``.
            losses: The losses of known form that the whole contains, if ``notes_losses``.
            retain_graph: Keep the graph for another backward pass.
        """
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what was taken since the last step."""
        self._losses = []
        self._scale: Tensor | None = None
        self._asked_for_graph = False  # by create_graph=True, which is not passed on

    def _known_scale(self, of: str) -> Tensor:
        """Return what a GradScaler has multiplied the loss by."""
        if self.grad_scale is not None:
            self._scale = self.grad_scale
        if self._scale is None:
            raise RuntimeError(
                f"{type(self).__name__}.step: scaler.unscale_(opt) took the scale off the gradients, and that of the "
                f"{of} is not known. Call opt.backward(loss, scaler=scaler) in place of "
                "opt.backward(scaler.scale(loss))."
            )
        return self._scale

    def _unscale_gradients(self) -> None:
        """Take the scale off gradients that still have it."""
        if self.grad_scale is not None:
            self._scale = self.grad_scale
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                p.grad.mul_(inverse_of(self._scale, p.device))


def inverse_of(scale: Tensor, device: torch.device) -> Tensor:
    """Return one over a scale, as a GradScaler computes it."""
    return scale.double().reciprocal().float().to(device)


def _as_list(inputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [inputs] if isinstance(inputs, Tensor) else list(inputs)
