"""What a layer was called with, and the gradients that come back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from metagrad.optim.torch_optim.layer_observer import LayerOptimizer


class Call:
    """One call of a layer.

    Attributes:
        inputs: What it was given.
        gradient: That of what it returned, summed over backward passes; None before the first.
        open_before: The calls of the layer that waited for a gradient when this one was made.
    """

    def __init__(self, inputs: Tensor, open_before: weakref.WeakSet[Call]) -> None:
        self.inputs = inputs
        self.gradient: Tensor | None = None
        self.open_before = open_before

    def overlaps(self, other: Call) -> bool:
        """Say whether both calls were made before either had a gradient."""
        return self in other.open_before or other in self.open_before


def without_base(output: Tensor) -> Tensor:
    """Return a tensor that is no view, such as the output of a linear layer on sequences is.

    What is written over a view, as by ``nn.ReLU(inplace=True)``, goes to its base, past its own place on the tape.
    """
    return output.clone() if output._is_view() else output


class LayerHook:
    """A forward hook that tells an optimizer of a layer's calls for as long as there is that optimizer.

    A copy, as of a model that is copied or pickled, tells nobody: the optimizer's own copy sets hooks of its own.
    """

    def __init__(self, optimizer: LayerOptimizer | None = None, name: str = "") -> None:
        self.optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.name = name

    def __reduce__(self) -> tuple[type[LayerHook], tuple[()]]:
        return LayerHook, ()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor | None:
        """Note a call whose gradient is wanted."""
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is None or not torch.is_grad_enabled() or not output.requires_grad:
            return None
        call = optimizer._called(self.name, args[0] if args else kwargs["input"])
        if call is None:
            return None
        output = without_base(output)
        # The graph holds the call, and the call holds nothing of the graph.
        output.register_hook(_Noting(self.optimizer, self.name, call))
        return output


class _Noting:
    def __init__(self, optimizer: weakref.ref[LayerOptimizer] | None, name: str, call: Call) -> None:
        self.optimizer = optimizer
        self.name = name
        self.call = call

    def __call__(self, gradient: Tensor) -> None:
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is not None:
            optimizer._returned(self.name, self.call, gradient.detach())
