r"""Likelihoods: losses whose curvature with respect to the output of a model is known in closed form.

Every loss here is a negative log-likelihood, :math:`L = \sum_n s_n \ell_n`. The weight :math:`s_n` is the
weight of a datum over the divisor of the mean. Vectors have the shape of the output. Several vectors
have more dimensions in front. To recognize a loss, it is called, and the torch function that returned its value is
recorded.
"""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from metagrad.core._torch import gradients_or_none
from metagrad.core.dispatch import Dispatch
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import Tree, tensors_in

_Arguments: TypeAlias = dict[str, Any]


@dataclass(frozen=True, eq=False)
class OutputLoss(ABC):
    """A loss of one output :math:`z` that is the negative log-likelihood of a predictive distribution.

    Attributes:
        output: :math:`z`, the output of the model.
        scale: The weights :math:`s`, in a shape that broadcasts to the shape of ``output``. Zero for ignored
            examples.
        count: Divisor of the mean, already applied to ``scale``. None for a sum.
    """

    output: Tensor
    scale: Tensor
    count: Tensor | float | None = field(default=None, kw_only=True)

    @property
    def num_data(self) -> int:
        """Number of data in the output: the size of its first dimension."""
        return len(self.output) if self.output.ndim else 1

    def hessian_product(self, vectors: Tensor) -> Tensor:
        r"""Multiply by :math:`H_L = \nabla^2_z L`, which is :math:`F_L` for most losses."""
        return self.fisher_product(vectors)

    @abstractmethod
    def fisher_product(self, vectors: Tensor) -> Tensor:
        r"""Multiply by :math:`F_L = \sum_n s_n\, \mathbb{E}_{y \sim p(y | z_n)} \nabla\ell_n \nabla\ell_n^\top`."""

    def root_column(self, unit: Tensor) -> Tensor:
        r"""Return one column c of a root of :math:`F_L`, for the output that ``unit`` selects for each datum.

        :math:`F_L` of a datum is the sum of :math:`c c^\top` over its columns. ``unit`` has the shape of the output.
        It is 1 for at most one output of a datum, and 0 elsewhere.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, generator: torch.Generator | None) -> Tensor:
        r"""Draw labels from the predictive distribution, and return :math:`\sqrt{s_n} \nabla\ell_n` for them."""


@dataclass(frozen=True, eq=False)
class Categorical(OutputLoss):
    r"""Cross-entropy of logits: :math:`\ell = -\log p_y` with :math:`p = \mathrm{softmax}(z)`.

    .. math:: H_L = F_L = s\, (\mathrm{diag}(p) - p p^\top)

    The curvature does not depend on the label. Probabilities as targets and smoothed labels have the same curvature.

    Args:
        output: Logits :math:`z`, ``[N, C, d...]``, or ``[C]``.
        scale: ``[N, 1, d...]``, or ``[1]``.

    Example:
        >>> loss = Categorical(torch.zeros(1, 2), torch.ones(1, 1))
        >>> loss.hessian_product(torch.tensor([[1.0, 0.0]]))
        tensor([[ 0.2500, -0.2500]])

    References:
        Martens, "New insights and perspectives on the natural gradient method", JMLR 21, 2020, section 8; Kunstner,
        Balles, Hennig, "Limitations of the empirical Fisher approximation", NeurIPS 2019, section 2.
    """

    @property
    def num_data(self) -> int:
        """Number of data in the output: 1, or the size of its first dimension."""
        return len(self.output) if self.output.ndim > 1 else 1

    @cached_property
    def probabilities(self) -> Tensor:
        """The predicted probabilities, in the shape of the logits."""
        return self.output.softmax(self._dim)

    @property
    def _dim(self) -> int:
        """The dimension of classes, counted from the end because vectors have more dimensions in front."""
        return -1 if self.output.ndim == 1 else 1 - self.output.ndim

    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Fisher matrix, which equals the Hessian."""
        weighted = self.probabilities * vectors
        return self.scale * (weighted - self.probabilities * weighted.sum(self._dim, keepdim=True))

    def root_column(self, unit: Tensor) -> Tensor:
        """Return the gradient for one class, times the root of its probability."""
        weight = (unit * self.probabilities).sum(self._dim, keepdim=True)
        return (self.scale * weight).sqrt() * (unit - self.probabilities)

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw classes."""
        p = self.probabilities.detach().movedim(self._dim, -1)
        drawn = torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator)
        label = torch.zeros_like(p).scatter_(-1, drawn.view(*p.shape[:-1], 1), 1).movedim(-1, self._dim)
        return self.scale.sqrt() * (self.probabilities - label)


class _Elementwise(OutputLoss):
    """A loss whose outputs are independent of each other."""

    @abstractmethod
    def _information(self) -> Tensor:
        """Return the Fisher information of each output, without its weight."""

    def fisher_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Fisher matrix, a diagonal matrix."""
        return self.scale * self._information() * vectors

    def root_column(self, unit: Tensor) -> Tensor:
        """Return the root of the Fisher information of one output."""
        return (self.scale * self._information()).sqrt() * unit


@dataclass(frozen=True, eq=False)
class Gaussian(_Elementwise):
    r"""Squared error: :math:`\ell = \tfrac{\lambda}{2} (z - y)^2`, for a Gaussian of precision :math:`\lambda`.

    .. math:: H_L = F_L = s \lambda

    ``F.mse_loss`` has :math:`\lambda = 2`.

    Args:
        output: Means :math:`z`, of any shape.
        scale: Weights, in a shape that broadcasts to the shape of ``output``.
        precision: :math:`\lambda`, in a shape that broadcasts to the shape of ``output``.

    Example:
        >>> loss = Gaussian(torch.zeros(2), scale=torch.tensor(0.5), precision=torch.tensor(2.0))
        >>> loss.hessian_product(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """

    precision: Tensor

    def _information(self) -> Tensor:
        return self.precision

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw targets."""
        return (self.scale * self.precision).sqrt() * _drawn(torch.randn, self.output, generator)


@dataclass(frozen=True, eq=False)
class Bernoulli(_Elementwise):
    r"""Binary cross-entropy of logits: :math:`p = \sigma(z)`.

    .. math:: H_L = F_L = s\, p (1 - p)

    Args:
        output: Logits :math:`z`, of any shape.
        scale: Weights, in a shape that broadcasts to the shape of ``output``. They include ``pos_weight``.

    Example:
        >>> Bernoulli(torch.zeros(1), scale=torch.tensor(1.0)).hessian_product(torch.ones(1))
        tensor([0.2500])
    """

    def _information(self) -> Tensor:
        p = self.output.sigmoid()
        return p * (1 - p)

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw labels."""
        p = self.output.sigmoid()
        return self.scale.sqrt() * (p - (_drawn(torch.rand, p, generator) < p).to(p.dtype))


@dataclass(frozen=True, eq=False)
class BernoulliProbability(_Elementwise):
    r"""Binary cross-entropy of probabilities :math:`z`. Its Hessian is not the Fisher matrix.

    .. math:: H_L = s \left(\frac{y}{z^2} + \frac{1 - y}{(1 - z)^2}\right), \qquad F_L = \frac{s}{z (1 - z)}

    Args:
        output: Probabilities :math:`z`, of any shape.
        scale: Weights, in a shape that broadcasts to the shape of ``output``.
        target: Labels :math:`y` between 0 and 1, in a shape that broadcasts to the shape of ``output``.

    Example:
        >>> loss = BernoulliProbability(torch.tensor([0.25]), torch.tensor(1.0), target=torch.ones(1))
        >>> loss.hessian_product(torch.ones(1)), loss.fisher_product(torch.ones(1))
        (tensor([16.]), tensor([5.3333]))
    """

    target: Tensor

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Hessian, a diagonal matrix."""
        p, q = self._clamped()
        return self.scale * (self.target / p**2 + (1 - self.target) / q**2) * vectors

    def _information(self) -> Tensor:
        p, q = self._clamped()
        return 1 / (p * q)

    def score(self, generator: torch.Generator | None) -> Tensor:
        """Draw labels."""
        p, q = self._clamped()
        label = _drawn(torch.rand, p, generator) < self.output
        return self.scale.sqrt() * torch.where(label, -1 / p, 1 / q)

    def _clamped(self) -> tuple[Tensor, Tensor]:
        # Torch clamps the denominator of the gradient in the same way.
        return self.output.clamp(min=1e-12), (1 - self.output).clamp(min=1e-12)


def _drawn(distribution: Callable[..., Tensor], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return distribution(like.shape, generator=generator, dtype=like.dtype, device=like.device)


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
