"""Optimizers that update all parameters as one vector, and call the closure again at other parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from metagrad.core.capture import RandomState
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import exchanged, own_buffers
from metagrad.core.tree import Params, widened
from metagrad.optim.second_order.curvature_optimizer import CurvatureOptimizer
from metagrad.optim.torch_optim.optimizer import Group, ParamsWithGrad, as_number


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Copy tensors into one vector, half precision as float32."""
    return torch.cat([widened(tensor).reshape(-1) for tensor in tensors])


def split(vector: Tensor, params: Params) -> Params:
    """Return the parts of a vector in the shapes of parameters."""
    parts = vector.split_with_sizes([p.numel() for p in params.values()])
    return {key: part.view(p.shape) for (key, p), part in zip(params.items(), parts, strict=True)}


class Objective(NamedTuple):
    """The objective of a step: the signed loss with its penalty, as a function of the parameters that move."""

    lr: Tensor  # 0-d, or a vector if groups differ, like decay
    decay: Tensor
    sign: int  # -1 if the loss is maximized
    has_penalty: bool

    def value(self, loss: float, w: Tensor) -> float:
        """Return the objective of a loss at parameters."""
        return self.sign * loss + (float(w.dot(self.decay * w)) / 2 if self.has_penalty else 0.0)

    def gradient(self, g: Tensor, w: Tensor) -> Tensor:
        """Return the gradient of the objective, from the gradient of the loss."""
        return self.moving(self.sign * g + self.decay * w if self.has_penalty else self.sign * g)

    def moving(self, v: Tensor) -> Tensor:
        """Return a vector with zeros for the parameters whose learning rate is 0."""
        return torch.where(self.lr != 0, v, 0.0) if self.lr.ndim else v

    def scaled(self, d: Tensor, g: Tensor) -> Tensor:
        """Multiply a descent direction by the learning rates, or by the smallest one if the step would climb."""
        step = self.lr * d
        if not self.lr.ndim or float(g.dot(step)) <= 0:
            return step
        return self.lr[self.lr > 0].min() * d


class VectorOptimizer(CurvatureOptimizer):
    r"""An optimizer that moves all parameters as one vector, along one direction :math:`d`.

    The step of a group is :math:`\eta d` with the learning rate of the group. If this step would increase the
    loss, all groups use the smallest learning rate. A group with the learning rate 0 does not change, and
    other groups treat it as constant. Groups may differ only in ``own_to_groups``.

    Weight decay :math:`\gamma` is part of the objective, which is the loss plus :math:`\gamma |w|^2 / 2`. ``step``
    returns the loss without this penalty.

    Further calls of the closure repeat the random numbers (dropout) of the first call. Afterwards ``.grad`` and the
    buffers of modules (running statistics of BatchNorm) have their values from the first call. Other side effects of
    the closure happen at every call.
    """

    own_to_groups: ClassVar[Sequence[str]] = ("lr", "weight_decay")
    """The options in which groups may differ."""
    _closure: Callable[[], Any] | None = None  # of the step in progress
    _seen: weakref.ref[Callable[[], Any]] | None = None  # the last closure
    _modules: Sequence[
        nn.Module
    ] = ()  # which it reaches. Their buffers move only in the first call of a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Computes the loss and its gradients, and returns the loss. It is called several times.

        Returns:
            The result of the first call of the closure, without its graph.
        """
        self._closure, self._random = closure, RandomState()
        if closure is not None and (self._seen is None or self._seen() is not closure):
            self._seen, self._modules = weakref.ref(closure), ReachableObjects(closure).modules
        try:
            return super().step(closure)
        finally:
            del self._closure, self._random

    @contextlib.contextmanager
    def _elsewhere(self, params: Params, w: Tensor) -> Generator[Callable[[], Any]]:
        """Yield the closure, to call it at other values of the parameters."""
        assert self._closure is not None
        parts = zip(params.values(), split(w, params).values(), strict=True)
        values = {p: part.to(p.dtype) for p, part in parts}
        with (
            self._random.restored(),
            own_buffers(self._modules),
            without_gradients(self._all_params()),
            exchanged(values),
            torch.enable_grad(),
        ):
            yield self._closure

    def _check_group(self, index: int) -> None:
        super()._check_group(index)
        self._check_agreement(index)
        kinds: dict[tuple[torch.dtype, torch.device], str] = {}
        for key, (_, p) in self._groups_by_name().items():
            kinds.setdefault((widened(p).dtype, p.device), f"{key!r} is {p.dtype} on {p.device}")
        if len(kinds) > 1:
            raise ValueError(
                f"{type(self).__name__}(params): all parameters make one vector, but {' and '.join(kinds.values())}. "
                "Give each kind an optimizer of its own."
            )

    def _check_agreement(self, index: int) -> None:
        first, group = self.param_groups[0], self.param_groups[index]
        for option in self.defaults:
            values = [as_number(one.get(option)) for one in (first, group)]
            if option not in (*self.own_to_groups, "step") and values[0] != values[1]:
                raise ValueError(
                    f"{type(self).__name__}(params): all groups make one step, whose {option} must be one, got "
                    f"{option}={values[0]} in group 0 and {values[1]} in group {index}. Only "
                    f"{', '.join(self.own_to_groups)} may differ; else give each group an optimizer of its own."
                )

    def _groups_by_name(self) -> dict[str, tuple[Group, Tensor]]:
        """Return every parameter with its group, by name. A name in two groups gets a prefix."""
        found: dict[str, tuple[Group, Tensor]] = {}
        for index, group in enumerate(self.param_groups):
            for key, p in self._named(index).items():
                found[f"param_groups[{index}]: {key}" if key in found else key] = (group, p)
        return found

    def _all_work(self) -> list[ParamsWithGrad]:
        for index, group in enumerate(self.param_groups):
            self._rule(group)
            self._check_agreement(index)
        return [self._work(self.param_groups[0], {key: p for key, (_, p) in self._groups_by_name().items()})]

    def _shared_states(self, params: Params) -> list[dict[str, Any]]:
        """Return the states of parameters, or empty ones if the parameters have taken different numbers of steps."""
        states = [self.state.get(p, {}) for p in params.values()]
        return states if len({state.get("step") for state in states}) == 1 else [{} for _ in states]

    def _column(self, name: str, params: Params) -> Tensor:
        """Return a hyperparameter as a 0-d tensor, or as a vector if groups differ."""
        groups = self._groups_by_name()
        numbers = {key: float(as_number(groups[key][0][name])) for key in params}
        if len(set(numbers.values())) == 1:
            return torch.tensor(next(iter(numbers.values())), dtype=torch.float64)
        return flat(torch.full_like(widened(p), numbers[key]) for key, p in params.items())

    def _objective(self, params: Params) -> Objective:
        sign = -1 if self.param_groups[0]["maximize"] else 1
        lr, decay = self._column("lr", params), self._column("weight_decay", params)
        return Objective(lr, decay, sign, bool(decay.any()))

    def _loss_of_before(self) -> RuntimeError:
        """Return the error for a closure that does not compute its loss at every call."""
        return RuntimeError(
            f"{type(self).__name__}.step(closure): the closure is called again at other parameters, and must compute "
            "the loss anew at every call. Call the model and the loss function inside the closure, before "
            "loss.backward()."
        )


@contextlib.contextmanager
def without_gradients(params: Sequence[Tensor]) -> Generator[None]:
    """Set ``.grad`` to None within a ``with`` block, and restore it afterwards."""
    kept = [p.grad for p in params]
    try:
        for p in params:
            p.grad = None
        yield
    finally:
        for p, g in zip(params, kept, strict=True):
            p.grad = g
