"""Recognize known losses, by calling a loss and recording the torch function that returned its value."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from metagrad.core._torch import gradients_or_none
from metagrad.core.dispatch import Dispatch
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Tree, tensors_in
from metagrad.curvature.likelihoods.output_losses import (
    Bernoulli,
    BernoulliProbability,
    Categorical,
    Gaussian,
    OutputLoss,
)

_Arguments: TypeAlias = dict[str, Any]


class EvaluatedLoss(NamedTuple):
    """The value of a loss, and its closed form if it was recognized."""

    value: Tensor
    known: OutputLoss | None  # its output is the argument of the known function, with its graph


def evaluate(loss_fn: Callable[[Tree, Tree], Tensor], output: Tree, target: Tree) -> EvaluatedLoss:
    """Call ``loss_fn(output, target)``, and find the closed form of its result.

    The form is known if ``loss_fn`` returns, unchanged, the result of ``F.cross_entropy``, ``F.mse_loss``,
    ``F.binary_cross_entropy_with_logits``, ``F.binary_cross_entropy``, ``F.gaussian_nll_loss``, or ``F.nll_loss`` of
    log-probabilities. Modules such as ``nn.CrossEntropyLoss``, partials and lambdas call these.

    Args:
        loss_fn: The loss.
        output: The output of the model, with its graph.
        target: The second argument of the loss.
    """
    ends = tensors_in(output)

    def is_plain(own: _Arguments) -> bool:
        """Return whether only the input depends on the outputs."""
        return _depend([own["input"]], ends) and not _depend(_others(own), ends)

    return _watched(lambda: loss_fn(output, target), is_plain)


def recognized(loss: Callable[[], Tensor]) -> EvaluatedLoss:
    """Evaluate a loss whose output is unknown. Its closed form is a function of the input of the known loss."""
    return _watched(loss, lambda own: not any(tensor.requires_grad for tensor in _others(own)))


def is_affine_in(tensor: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Return whether a tensor is an affine function of only the outputs, such as a slice of an output.

    A loss of the tensor then has the same Gauss-Newton matrix as a loss of the outputs.
    """
    ends = {output.grad_fn for output in outputs if output.grad_fn is not None}
    if tensor.grad_fn is None or tensor.grad_fn in ends:
        return tensor.grad_fn in ends
    if any(not node.next_functions for node in graph_nodes([tensor], set(ends))):  # a leaf
        return False
    slopes = gradients_or_none(tensor, outputs, torch.ones_like(tensor), create_graph=True, allow_unused=True)
    return not any(slope is not None and slope.requires_grad for slope in slopes)


class _Call(NamedTuple):
    function: Callable[..., Tensor]
    arguments: _Arguments
    result: Tensor  # kept alive, so no other tensor gets its id
    node: Node | None  # autograd node of the result when it was returned


class _LossCalls(Dispatch):
    """Records the calls of losses that have a closed form, by the id of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, _Call] = {}

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and record the call if it is such a loss."""
        result = function(*args, **kwargs)
        if function in _MAKERS:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls[id(result)] = _Call(function, bound.arguments, result, result.grad_fn)
        return result


def _watched(loss: Callable[[], Tensor], is_plain: Callable[[_Arguments], bool]) -> EvaluatedLoss:
    """Evaluate a loss. It is known if a known call made it, with plain arguments, none of them deprecated."""
    with _LossCalls() as watch:
        value = loss()
    call = watch.calls.get(id(value))
    # A loss with another node was modified in place since, for example by loss /= 2.
    if call is None or call.node is not value.grad_fn or value.ndim:
        return EvaluatedLoss(value, None)
    own = call.arguments
    is_deprecated = any(own.get(name) is not None for name in ("size_average", "reduce"))
    return EvaluatedLoss(value, _MAKERS[call.function](own) if is_plain(own) and not is_deprecated else None)


def _others(arguments: _Arguments) -> list[Tensor]:
    return [v for name, v in arguments.items() if name != "input" and isinstance(v, Tensor)]


def _depend(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    ends = {output.grad_fn for output in outputs if output.grad_fn is not None}
    return any(node in ends for node in graph_nodes(tensors))


def _cross_entropy(arguments: _Arguments) -> OutputLoss | None:
    logits, target = arguments["input"], arguments["target"]
    dim = min(logits.ndim - 1, 1)
    weight = arguments["weight"]
    weight = logits.new_ones(logits.shape[dim]) if weight is None else weight
    smoothing = arguments["label_smoothing"]
    if target.is_floating_point():
        smooth = (1 - smoothing) * target + smoothing / logits.shape[dim]
        scale = (smooth.movedim(dim, -1) * weight).sum(-1)
        count = scale.numel()
    else:
        kept = target != arguments["ignore_index"]
        chosen = weight[target.where(kept, 0)] * kept
        count = kept.sum() if arguments["weight"] is None else chosen.sum()
        scale = (1 - smoothing) * chosen + smoothing * weight.mean() * kept
    scale = scale.unsqueeze(dim)
    if arguments["reduction"] == "mean":
        return Categorical(logits, scale / count, count=count)
    return Categorical(logits, scale)


def _nll(arguments: _Arguments) -> OutputLoss | None:
    # The softmax of normalized log-probabilities is the probabilities. Their Jacobian differs from the logits' along
    # the constant vector, which is in the kernel of diag(p) - p p^T.
    log_probabilities = arguments["input"].detach()
    totals = log_probabilities.logsumexp(min(log_probabilities.ndim - 1, 1))
    if not bool((totals.abs() <= 1e-3).all()):
        return None
    return _cross_entropy({**arguments, "label_smoothing": 0.0})


def _squares(arguments: _Arguments) -> OutputLoss | None:
    z, weight = arguments["input"], arguments.get("weight")
    return _elementwise(
        arguments,
        lambda scale: Gaussian(z, scale, z.new_full((), 2.0)),
        None if weight is None else weight.sum(),
    )


def _gaussian(arguments: _Arguments) -> OutputLoss | None:
    z, var = arguments["input"], arguments["var"]
    var = var if isinstance(var, Tensor) else z.new_full((), var)
    if var.ndim and var.shape != z.shape:
        var = var.unsqueeze(-1) if var.shape == z.shape[:-1] else var
    precision = 1 / var.clamp(min=arguments["eps"])
    return _elementwise(arguments, lambda scale: Gaussian(z, scale, precision))


def _bernoulli(arguments: _Arguments) -> OutputLoss | None:
    z, y, positive = arguments["input"], arguments["target"], arguments["pos_weight"]
    factor = 1 if positive is None else 1 + (positive - 1) * y
    return _elementwise(arguments, lambda scale: Bernoulli(z, scale * factor))


def _bernoulli_probability(arguments: _Arguments) -> OutputLoss | None:
    z, y = arguments["input"], arguments["target"]
    return _elementwise(arguments, lambda scale: BernoulliProbability(z, scale, y))


def _elementwise(
    arguments: _Arguments, make: Callable[[Tensor], OutputLoss], count: Tensor | None = None
) -> OutputLoss | None:
    """Make a loss of independent outputs. Its mean is over all outputs unless ``count`` is given."""
    z, target, weight = arguments["input"], arguments["target"], arguments.get("weight")
    if torch.broadcast_shapes(z.shape, target.shape) != z.shape:
        return None
    scale = z.new_ones(()) if weight is None else weight
    if arguments["reduction"] != "mean":
        return make(scale)
    divisor = z.numel() if count is None else count
    return dataclasses.replace(make(scale / divisor), count=divisor)  # type: ignore[type-var]


_MAKERS: dict[Callable[..., Tensor], Callable[[_Arguments], OutputLoss | None]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll,
    F.mse_loss: _squares,
    F.gaussian_nll_loss: _gaussian,
    F.binary_cross_entropy_with_logits: _bernoulli,
    F.binary_cross_entropy: _bernoulli_probability,
}

KNOWN_LOSSES = tuple(_MAKERS)
"""The losses whose curvature with respect to the output is known in closed form."""
