"""Hooks on the layers of a model that record their inputs, and the gradients of their outputs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from metagrad.core._torch import averaging_wrapper
from metagrad.optim.kronecker.factors import Sums, added, sums_of
from metagrad.optim.kronecker.layers import Layer, known_layers, layer_rows, without_base
from metagrad.optim.rule import Params
from metagrad.optim.tape_curvature import WeightedLoss
from metagrad.optim.torch_optim.curvature_optimizer import SEED, CurvatureOptimizer
from metagrad.optim.torch_optim.optimizer import GROUP, NONFINITE, Group, Option


class ObservedCall:
    """One call of a layer.

    Attributes:
        inputs: The input of the layer.
        gradient: That of the output, summed over backward passes; None before the first.
        open_before: The earlier calls of the layer that had no gradient yet when this one was made.
    """

    def __init__(self, inputs: Tensor, open_before: weakref.WeakSet[ObservedCall]) -> None:
        self.inputs = inputs
        self.gradient: Tensor | None = None
        self.open_before = open_before

    def overlaps(self, other: ObservedCall) -> bool:
        """Say whether both calls were made before either had a gradient."""
        return self in other.open_before or other in self.open_before


class LayerHook:
    """A forward hook that reports a layer's calls to an optimizer, as long as that exists.

    A copied hook, as of a model that is copied or pickled, is inert: a copy of the optimizer sets its own hooks.
    """

    def __init__(self, optimizer: LayerOptimizer | None = None, name: str = "") -> None:
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.name = name

    def __reduce__(self) -> tuple[type[LayerHook], tuple[()]]:
        return LayerHook, ()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Note a call whose gradient is wanted."""
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is None or not torch.is_grad_enabled() or not output.requires_grad:
            return None
        if optimizer.group is None and averaging_wrapper() is not None:
            raise ValueError(
                "KFAC(model): DistributedDataParallel averages the gradients, and the factors would be those of this "
                "process, so that parameters would drift apart. Pass group=torch.distributed.group.WORLD, and give "
                "every process as many examples."
            )
        call = optimizer._called(self.name, args[0] if args else kwargs["input"])
        if call is None:
            return None
        output = without_base(output)
        # The graph holds the call, and the call holds nothing of the graph.
        output.register_hook(_Noting(self.optimizer, self.name, call))
        return output


class _Noting:
    def __init__(self, optimizer: weakref.ref[LayerOptimizer] | None, name: str, call: ObservedCall) -> None:
        self.optimizer = optimizer
        self.name = name
        self.call = call

    def __call__(self, gradient: Tensor) -> None:
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None:
            optimizer._returned(self.name, self.call, gradient.detach())


class LayerOptimizer(CurvatureOptimizer):
    """An optimizer that records the inputs of a model's layers and the gradients of their outputs, by hooks.

    Layers are identified by the names of their weights. They are observed at the steps whose number is a multiple of
    ``curvature_every`` of a layer's group, and wherever a layer has no factors yet. With
    ``fisher="empirical"`` the gradients are those of every backward pass; with ``"sampled"``, those for labels that
    are drawn. Calls are kept until the next call of the layer, which is that of the next micro-batch, and as sums
    until the step; with ``eigen`` all of them until the step.
    """

    options: ClassVar[Mapping[str, Option]] = {
        "nonfinite": NONFINITE,
        "eigen": Option(
            False,
            "Correct the eigenvalues of the Kronecker product by second moments of the examples' gradients (EKFAC); "
            "``damping`` is then added to these.",
            "bool",
        ),
        "params": Option(
            None,
            "Groups of the model's parameters, with hyper-parameters of their own; those left out stay. A layer "
            "follows the group of its weight; a bias in another group moves along the plain gradient.",
            "Sequence[dict[str, Any]] | None",
        ),
        "seed": SEED,
        "group": GROUP,
    }
    moves = (
        "model",
        "Whose parameters are trained. Hooks stay on its layers until :meth:`close`, or until the optimizer is gone.",
    )
    notes_losses = True
    differentiates_twice = False

    def __init__(self, model: nn.Module, *args: Any, **options: Any) -> None:
        defaults = self._given(model, *args, **options)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"KFAC(model): model must be the nn.Module whose layers are observed, got {type(model).__name__}. "
                "Pass the model itself; params= takes groups of its parameters."
            )
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        layers = known_layers("KFAC(model)", model).values()
        self._layers: dict[str, Layer] = {self._names[layer.weight]: layer for layer in layers}
        self._handles: list[RemovableHandle] = []
        groups = defaults.pop("params")
        self._initialize(model.named_parameters() if groups is None else groups, defaults)
        self._set_hooks()

    def close(self) -> None:
        """Remove the hooks from the model; the factors stay as they are."""
        _remove(self._handles)

    def __getstate__(self) -> dict[str, Any]:
        own = {"_names": self._names, "_layers": self._layers, "_handles": self._handles}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._handles:
            _remove(self._handles)  # the inert ones of the copied model
            self._set_hooks()

    def _named(self, index: int) -> Params:
        """Return the parameters of a group by their names in the model, which tell the bias of a weight."""
        return {self._names.get(p, key): p for key, p in super()._named(index).items()}

    def _called(self, name: str, inputs: Tensor) -> ObservedCall | None:
        """Record a layer's call, if its gradient is needed."""
        weight = self._layers[name].weight
        group = self._group_of(weight)
        if group is None or not inputs.numel():  # no examples have no mean
            return None
        # As the rule's `needs_curvature`, which is not made at each call of a layer.
        if group["step"] % group["curvature_every"] and not self._lacks_factors(name):
            return None
        if weight.grad is None:  # what there is belongs to a gradient that was dropped
            self._calls.pop(name, None)
            self._sums.pop(name, None)
        if not group["eigen"]:
            self._reduce(name)  # a micro-batch before: what is left of it are sums
        waiting = self._waiting.setdefault(name, weakref.WeakSet())
        call = ObservedCall(inputs.detach(), weakref.WeakSet(waiting))
        waiting.add(call)
        return call

    def _returned(self, name: str, call: ObservedCall, gradient: Tensor) -> None:
        """Take the gradient of what a call returned."""
        if not (self._draws or self.param_groups[0]["fisher"] == "empirical"):
            return
        if call.gradient is not None:
            call.gradient = call.gradient + gradient
            return
        calls = self._calls.setdefault(name, [])
        if any(call.overlaps(other) for other in calls):
            raise ValueError(
                f"KFAC: the layer of {name!r} was called twice in one backward pass, and the factors of shared "
                "layers are not known. Use a layer of its own for each call, call backward() for each micro-batch, "
                "or use another optimizer."
            )
        call.gradient = gradient
        calls.append(call)
        self._waiting[name].discard(call)

    def _reduce(self, name: str, *, keep_calls: bool = False) -> None:
        for rows in self._rows(name):
            self._sums[name] = added(self._sums.get(name), sums_of(*rows))
        if not keep_calls:
            self._calls.pop(name, None)

    def _rows(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        layer = self._layers[name]
        for call in self._calls.get(name, []):
            assert call.gradient is not None
            yield layer_rows(layer, call.inputs, call.gradient, has_bias=self._bias_of(layer) is not None)

    def _bias_of(self, layer: Layer) -> Tensor | None:
        """Return the bias of a layer if it is trained in the group of the weight, as that of one more input."""
        bias = layer.bias
        if bias is None or not bias.requires_grad or self._group_of(bias) is not self._group_of(layer.weight):
            return None
        return bias

    def _forget(self) -> None:
        super()._forget()
        self._waiting: dict[str, weakref.WeakSet[ObservedCall]] = {}
        self._calls: dict[str, list[ObservedCall]] = {}
        self._sums: dict[str, Sums] = {}
        self._shares: dict[
            str, float
        ] = {}  # of this process in the sums over those of all, by its gradients' factor
        self._draws = False

    def _set_hooks(self) -> None:
        self._handles.extend(
            layer.register_forward_hook(LayerHook(self, name), with_kwargs=True)
            for name, layer in self._layers.items()
        )
        weakref.finalize(self, _remove, self._handles)

    def _is_curvature_due(self) -> bool:
        if self.param_groups[0]["fisher"] != "sampled":
            return False
        weights = {name: layer.weight for name, layer in self._layers.items()}
        trained = (name for name, w in weights.items() if w.requires_grad and self._group_of(w) is not None)
        return super()._is_curvature_due() or any(map(self._lacks_factors, trained))

    def _observe(
        self, grads: Mapping[Tensor, Tensor], losses: Sequence[WeightedLoss], *, retain_graph: bool
    ) -> None:
        if not losses:
            raise ValueError(
                'KFAC(fisher="sampled"): the loss contains none from which labels can be drawn. Compute it inside '
                "the closure, or within `with opt.recording():`, by F.cross_entropy, F.mse_loss, F.nll_loss, "
                "F.gaussian_nll_loss, F.binary_cross_entropy or F.binary_cross_entropy_with_logits, reduced to a "
                "mean or a sum."
            )
        generators = self._generators(draws_labels=True)
        weights = [layer.weight for layer in self._layers.values() if layer.weight in grads]
        if not weights:
            return
        self._draws = True
        try:
            for index, (loss, weight) in enumerate(losses):
                score = weight.abs().sqrt() * loss.score(generators(loss.output.device))
                keep = retain_graph or index + 1 < len(losses)
                torch.autograd.grad(
                    loss.output, weights, score.detach(), retain_graph=keep, allow_unused=True
                )
        finally:
            self._draws = False

    def _group_of(self, param: Tensor) -> Group | None:
        return next((g for g in self.param_groups if any(p is param for p in g["params"])), None)

    def _lacks_factors(self, name: str) -> bool:
        """Say whether there are none yet, or none of these inputs: the bias may have been frozen meanwhile."""
        layer = self._layers[name]
        num_inputs = layer.weight[0].numel() + (self._bias_of(layer) is not None)
        known = self.state.get(layer.weight, {}).get("inputs")
        return known is None or len(known) != num_inputs


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
