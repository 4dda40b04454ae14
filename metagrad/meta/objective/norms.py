"""Policies for the statistics of normalization layers, such as batch normalization.

The model does not change. During a call, ``F.batch_norm`` follows the policy with operations that use no buffers, so
``torch.vmap`` supports them. The updates of the running statistics are collected, and applied once after the tasks of
a meta-batch. Recomputation therefore does not update them again, and vectorized tasks update them as a loop does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core._torch import at_least_2d, named_modules
from metagrad.core.checks import check_choice
from metagrad.core.dispatch import Dispatch
from metagrad.core.reach import Place, placed
from metagrad.core.tree import tree_map, widened
from metagrad.meta.objective.structured import Nested

Norm = Literal["transductive", "support", "running", "per_step", "per_step_transductive"]
"""The policies, see :class:`metagrad.MAML`."""

OF_STEPS = ("per_step", "per_step_transductive")
"""The policies with separate statistics, weights and biases for each inner step."""

_CALL = "MAML(..., norm"
_STATISTICS = ("running_mean", "running_var")


class Moments(NamedTuple):
    """The mean and variance of each channel, ``[C]`` or ``[tasks, C]``."""

    mean: Tensor
    var: Tensor


def statistical_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with running statistics over a batch, by name."""
    return {
        name: module
        for name, module in named_modules(model)
        if all(statistic in module._buffers for statistic in _STATISTICS)
        and not isinstance(module, _torch.InstanceNorm)
    }


def check_norm(model: nn.Module, norm: object, steps: int, name: str = "MAML") -> None:
    """Raise ``ValueError`` if a policy is unknown, or does not fit the model."""
    if norm is None:
        return
    call = f"{name}(..., norm={norm!r})"
    check_choice(f"{name}(..., norm)", norm, Norm)
    for path, module in named_modules(model):
        if isinstance(module, _torch.InstanceNorm) and module.track_running_stats:
            raise ValueError(
                f"{call}: the running statistics of {type(module).__name__} ({path or 'the model itself'}) follow no "
                "policy. Construct it with track_running_stats=False."
            )
    layers = statistical_norms(model)
    if not layers:
        raise ValueError(
            f"{call}: no module of the model normalizes by statistics that can be kept, as nn.BatchNorm2d does. "
            "Pass norm=None."
        )
    without = [path for path, module in layers.items() if module._buffers["running_mean"] is None]
    if without and norm in ("running", *OF_STEPS):
        raise ValueError(
            f"{call}: {type(layers[without[0]]).__name__} ({without[0] or 'the model itself'}) keeps no running "
            'statistics. Construct it with track_running_stats=True, or take norm="transductive".'
        )
    if norm in OF_STEPS and not steps:
        raise ValueError(f"{call}: there are statistics for each inner step, but steps is 0.")


class PerStepNorms(nn.Module):
    """Separate running statistics for each inner step, and separate learned weights and biases.

    Entry t is for the support examples at step t and the query examples after it. All entries start with the values
    of the model.

    Args:
        model: The model.
        steps: The number of steps.
    """

    def __init__(self, model: nn.Module, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.keys: dict[str, str] = {}
        self.replaced: set[str] = set()
        for name, layer in statistical_norms(model).items():
            key = name.replace(".", "_") or "model"
            while key in self.keys.values():
                key += "_"
            self.keys[name] = key
            for kind, buffer in layer._buffers.items():
                if buffer is not None:
                    self.register_buffer(f"{key}_{kind}", _repeated(buffer, steps))
            for kind in ("weight", "bias"):
                param = layer._parameters.get(kind)
                if param is not None and param.requires_grad:
                    self.register_parameter(f"{key}_{kind}", nn.Parameter(_repeated(param, steps)))
                    self.replaced.add(f"{name}.{kind}".lstrip("."))

    def others(self, names: Iterable[str]) -> list[str]:
        """Return the names of parameters that are not replaced here. Raise an error if no parameter remains."""
        others = [name for name in names if name not in self.replaced]
        if not others:
            raise ValueError(
                "MAML(..., adapt, norm): only weights and biases of normalizations are to adapt, but there are "
                'others for each step instead. Let more adapt, or take norm="running" or "transductive".'
            )
        return others

    def at(self, name: str, kind: str, step: int, otherwise: Tensor | None) -> Tensor | None:
        """Return a parameter or buffer of a layer at a step."""
        if step >= self.steps:
            raise ValueError(
                f"MAML(batch, steps, norm): there are statistics for {self.steps} inner steps, but this is "
                f"step {step} (the first is 0). Take fewer steps, or construct it with more."
            )
        values = getattr(self, f"{self.keys[name]}_{kind}", None)
        return otherwise if values is None else values[step]


def _repeated(tensor: Tensor, steps: int) -> Tensor:
    return tensor.detach().expand(steps, *tensor.shape).clone()


_Key: TypeAlias = tuple[int, str, int]
"""The number of a pass, a layer, and the number of earlier calls of the layer in that pass."""


class Norms:
    """The policy of a model, and the statistics that its calls collect in one meta-batch.

    Args:
        model: The model.
        policy: The policy.
        per_step: The statistics, weights and biases of each step, for ``"per_step"``.
    """

    def __init__(self, model: nn.Module, policy: Norm, per_step: PerStepNorms | None = None) -> None:
        self.policy = policy
        self.per_step = per_step
        self.layers = statistical_norms(model)
        self._found: dict[_Key, list[tuple[Moments, float]]] | None = None
        self._met: set[str] = set()

    def names(self) -> dict[int, str]:
        """Return the names of layers by the ids of their running means. A recomputation replaces the tensors."""
        means = ((name, layer._buffers["running_mean"]) for name, layer in self.layers.items())
        return {id(mean): name for name, mean in means if mean is not None}

    def begin(self) -> None:
        """Start to collect statistics."""
        self._found = {}

    def collect(self, number: int, found: Sequence[tuple[str, float]], moments: Sequence[Moments]) -> None:
        """Collect the statistics of a call of the model, ``[C]`` or ``[tasks, C]``."""
        if self._found is None:
            return
        occurrences: dict[str, int] = {}
        for (layer, momentum), own in zip(found, moments, strict=True):
            occurrence = occurrences.get(layer, 0)
            occurrences[layer] = occurrence + 1
            self._found.setdefault((number, layer, occurrence), []).append((own, momentum))

    def met(self, layer: str) -> None:
        """Record that a layer calls a function that the policy replaces."""
        self._met.add(layer)

    def finish(self) -> None:
        """Update the running statistics, once per pass, towards the mean over tasks."""
        self._refuse_unmet()
        found, self._found = self._found or {}, None
        with torch.no_grad():
            for key in sorted(found):
                self._move(key, found[key])

    def _refuse_unmet(self) -> None:
        for name in self.names().values():
            layer = self.layers[name]
            if name not in self._met and type(layer).forward is not _torch.BatchNorm.forward:
                raise ValueError(
                    f"{_CALL}={self.policy!r}): {type(layer).__name__} ({name}) has a forward of its own that does "
                    "not call F.batch_norm with its running statistics, so the policy cannot reach it. Let it call "
                    "that, or pass norm=None."
                )

    def _move(self, key: _Key, found: Sequence[tuple[Moments, float]]) -> None:
        number, name, _ = key
        own, momentum = self.layers[name]._buffers, found[0][1]
        mean, var = (torch.cat([at_least_2d(moments[i]) for moments, _ in found]).mean(0) for i in (0, 1))
        running_mean, running_var, count = (
            self.at(name, kind, number // 2, own.get(kind)) for kind in (*_STATISTICS, "num_batches_tracked")
        )
        if count is not None:
            count.add_(1)
            if getattr(self.layers[name], "momentum", 0.0) is None:
                momentum = 1.0 / float(count)
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)  # type: ignore[union-attr]
        running_var.lerp_(var.to(running_var.dtype), momentum)  # type: ignore[union-attr]

    def at(self, name: str, kind: str, step: int, own: Tensor | None) -> Tensor | None:
        """Return a parameter or buffer of a layer at a step."""
        return own if self.per_step is None else self.per_step.at(name, kind, step, own)


@dataclass(frozen=True)
class NormPass:
    """A pass of the model over examples, under a policy.

    Attributes:
        norms: The policy.
        number: 2t for the support examples at step t, 2t + 1 for the query examples after it.
        is_counted: Whether the pass updates running statistics.
        reference: The support examples. With ``"support"``, their statistics normalize the query examples.
    """

    norms: Norms
    number: int = 0
    reference: Nested | None = field(default=None, repr=False)
    is_counted: bool = True

    @property
    def is_of_sets(self) -> bool:
        """Whether the statistics are from a set of examples, also in evaluation."""
        return self.norms.policy in ("transductive", "support", "per_step_transductive")

    def support(self, step: int) -> NormPass:
        """Return the pass over the support examples at a step."""
        return replace(self, number=2 * step, reference=None)

    def query(self, steps: int, support_x: Nested) -> NormPass:
        """Return the pass over the query examples after a number of steps."""
        reference = support_x if self.norms.policy == "support" else None
        return replace(self, number=2 * max(steps, 1) - 1, reference=reference)

    def uncounted(self) -> NormPass:
        """Return a pass that does not update running statistics."""
        return replace(self, is_counted=False, reference=None)

    def of_task(self, number: int) -> NormPass:
        """Return the pass of one task."""
        if self.reference is None:
            return self
        return replace(self, reference=tree_map(lambda tensor: tensor[number], self.reference))

    def without_counters(self) -> contextlib.AbstractContextManager[None]:
        """Disable the call counters of modules. Calls are counted once for all tasks."""
        counting = (m._buffers for m in self.norms.layers.values() if "num_batches_tracked" in m._buffers)
        return placed([(Place(buffers, "num_batches_tracked"), None) for buffers in counting])

    def collect(self, found: Sequence[tuple[str, float]], moments: Sequence[Moments]) -> None:
        """Collect the statistics of a call, if the pass updates running statistics."""
        if self.is_counted:
            self.norms.collect(self.number, found, moments)


@contextlib.contextmanager
def normalised(norms: NormPass | None) -> Generator[None]:
    """Apply the policy in a ``with`` block, without updates of running statistics."""
    if norms is None:
        yield
        return
    with norms.without_counters(), NormCalls(norms.uncounted()):
        yield


class NormCalls(Dispatch):
    """Applies a policy in a ``with`` block, which is one call of the model or of a layer.

    Args:
        norms: The pass.
        given: The statistics to use, in the order of the calls. None uses the statistics of the policy.
        measures: Whether to record the statistics.

    Attributes:
        found: The layers whose running statistics will be updated, with their momentum, in the order of the calls.
        moments: The statistics of these layers, or the recorded statistics.
    """

    def __init__(
        self, norms: NormPass, given: Sequence[Moments] | None = None, *, measures: bool = False
    ) -> None:
        super().__init__()
        self.norms, self.given, self.measures = norms, given, measures
        self.names = norms.norms.names()
        self.found: list[tuple[str, float]] = []
        self.moments: list[Moments] = []
        self.num_calls = 0

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace ``F.batch_norm``. A handler in the table would create a reference cycle with this mode."""
        return (self._batch_norm if function is F.batch_norm else function)(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        name = self._layer(running_mean)
        weight, bias = self._at_step(name, weight=weight, bias=bias)
        if self.norms.is_of_sets:
            return self._by_sets(input, weight, bias, eps)
        if not training:
            mean, var = self._at_step(name, running_mean=running_mean, running_var=running_var)
            return F.batch_norm(input, mean, var, weight, bias, False, momentum, eps)
        mean, var = _moments(input, unbiased=True)
        self.found.append((name, momentum))
        self.moments.append(Moments(mean.detach(), var.detach()))
        return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)

    def _by_sets(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Normalize with the statistics of the input, or with the given statistics."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if self.given is None:
            if self.measures:
                self.moments.append(_moments(input, unbiased=False))
            return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)
        if number >= len(self.given):
            raise ValueError(
                f'{_CALL}="support"): the model normalizes more often for the query examples than for the support '
                "examples. Let what it calls not depend on the data."
            )
        shape = (-1, *[1] * (input.ndim - 2))
        mean, var = (statistic.view(shape) for statistic in self.given[number])
        result = (widened(input) - mean) * (var + eps).rsqrt()
        result = result if weight is None else result * weight.view(shape)
        return (result if bias is None else result + bias.view(shape)).to(input.dtype)

    def _at_step(self, name: str, **own: Tensor | None) -> list[Tensor | None]:
        """Return the statistics, or weight and bias, at the step."""
        return [self.norms.norms.at(name, kind, self.norms.number // 2, value) for kind, value in own.items()]

    def _layer(self, running_mean: Tensor | None) -> str:
        """Return the name of the layer with these running statistics.

        The name may be empty if the policy needs none.
        """
        norms = self.norms.norms
        name = self.names.get(id(running_mean))
        if name is not None:
            norms.met(name)
            return name
        if self.norms.is_of_sets and norms.per_step is None:
            return ""
        raise ValueError(
            f"{_CALL}={norms.policy!r}): the model calls F.batch_norm without running statistics that are the "
            'buffers "running_mean" and "running_var" of one of its modules. Register them so.'
        )


def _moments(input: Tensor, *, unbiased: bool) -> Moments:
    axes = (0, *range(2, input.ndim))
    var, mean = torch.var_mean(widened(input), axes, correction=int(unbiased))
    return Moments(mean, var)
