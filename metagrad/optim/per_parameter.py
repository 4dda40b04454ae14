"""The base class of rules that update one parameter at a time.

A subclass defines only the formula of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from metagrad.core.checks import refuse
from metagrad.core.tree import Params, widened
from metagrad.optim.hyperparameters import check_hyperparameter, count, values_at
from metagrad.optim.rule import Hyperparameter, RuleNode
from metagrad.sparse.tables.row_sparse import RowSparse

Slot: TypeAlias = "Tensor | tuple[Slot, ...] | None"
"""The state of a parameter in one slot: a tensor in its shape, or matrices for its axes."""

Values: TypeAlias = Any
"""The hyperparameters of one parameter at one step, by name. ``betas`` are ``beta1`` and ``beta2``."""


class PerParameter(RuleNode):
    """A rule that is defined by its update of one parameter.

    A subclass is a frozen dataclass that declares its hyperparameters and its ``State``. It implements
    ``init_slots`` and ``update_param``, which receives the hyperparameters of the step and the parameter.

    An elementwise rule has ``decays_linearly``. It is True if a step scales all elements that had only zero gradients
    by one common factor.

    A parameter in half precision is updated in float32 and rounded, and its state is float32. In bfloat16,
    averages would not change, and in float16, squares of gradients overflow or underflow.
    """

    call: ClassVar[str]
    """The call that makes the rule, for errors: ``"adam(...)"``."""
    State: ClassVar[type]
    """A named tuple of ``step`` and the slots, by parameter name. A slot that is not needed is None."""
    takes_rows: ClassVar[bool] = False
    """Whether a gradient may be RowSparse."""
    maximize: bool
    update_param: Callable[..., tuple[Any, ...]]
    """``update_param(h, step, w, g, *slots)`` returns a parameter and its slots. ``step`` is 0 at first."""

    def __post_init__(self) -> None:
        betas, default = (getattr(each, "betas", ()) for each in (self, type(self)))
        if not hasattr(betas, "__len__") or len(betas) != len(default):
            raise ValueError(f"{self.call}: betas must be as many as in {default}, got {betas}.")
        for name, value in self._hyperparameters():
            check_hyperparameter(self.call, name, value, below=self.below[name.partition("[")[0]])

    def init_slots(self, param: Tensor) -> tuple[Slot, ...]:
        """Return the state of a parameter before the first step, a tensor for each slot."""
        raise NotImplementedError

    def check(self, key: str, param: Tensor) -> None:
        """Raise an error for a parameter that the rule cannot update."""
        check_real(f"{self.call}.init", key, param)

    def init(self, params: Params) -> Any:
        """Return the state before the first step."""
        if not hasattr(params, "items"):
            refuse(f"{self.call}.init(params)", "a dict by name", type(params).__name__, TypeError)
        for key, param in params.items():
            self.check(key, param)
        rows = [self.init_slots(widened(param)) for param in params.values()]
        return self.State(0, *_by_name(params, rows, self.init_slots(torch.empty(0))))

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        """Take one step."""
        gradients = checked_gradients(self.call, grads, params, takes_rows=self.takes_rows)
        slots, rows = state[1:], []
        for (key, w), h in zip(params.items(), self._at(state.step, params), strict=True):
            own = [None if slot is None else slot[key] for slot in slots]
            if not w.numel():
                rows.append([w, *own])  # `update_param` need not know about parameters without elements
                continue
            g = widened(-gradients[key] if self.maximize else gradients[key])
            new, *moved = self.update_param(h, count(state.step, w.dtype), widened(w), g, *own)
            # A 0-d tensor as hyperparameter widens a 0-d parameter.
            rows.append([new.to(w.dtype), *map(_as_before, own, moved)])
        news, *fields = _by_name(params, rows, (params, *slots))
        return news, self.State(state.step + 1, *fields)

    def _at(self, step: int | Tensor, params: Params) -> list[Values]:
        """Choose the hyperparameters of each parameter at one step."""
        pairs = list(self._hyperparameters())
        if all(isinstance(value, (int, float)) for _, value in pairs):
            return [self.values(*(value for _, value in pairs))] * len(params)
        chosen = [values_at(name, value, step, params) for name, value in pairs]
        return [self.values(*own) for own in zip(*chosen, strict=True)]

    def _hyperparameters(self) -> Iterator[tuple[str, Hyperparameter]]:
        """Yield the hyperparameters under their public names, in the order of ``values``."""
        for name in self.hyper:
            value = getattr(self, name)
            if name == "betas":
                yield from ((f"betas[{i}]", beta) for i, beta in enumerate(value))
            else:
                yield name, value


def _as_before(old: Slot, new: Any) -> Any:
    """Return the new value of a slot in the dtype of the old value."""
    if isinstance(old, tuple):
        return tuple(map(_as_before, old, new))
    return None if old is None else new.to(old.dtype)


def check_real(call: str, key: str, param: Tensor) -> None:
    """Raise an error unless a parameter is a floating point tensor that has a shape."""
    if not torch.compiler.is_compiling() and is_lazy(param):
        raise ValueError(
            f"{call}: {key!r} belongs to a lazy module and has no shape yet. Call the model on a batch first."
        )
    if not param.is_floating_point():
        raise TypeError(
            f"{call}: {key!r} is {param.dtype}, and must be real, of a floating point dtype. A complex one can be "
            "kept as torch.view_as_real gives it, and made complex by torch.view_as_complex in the model."
        )


def checked_gradients(call: str, grads: Params, params: Params, *, takes_rows: bool = False) -> Params:
    """Return the gradients in the order of ``params``.

    Raise an error for missing and unsupported sparse gradients.
    """
    if not hasattr(grads, "get") or not hasattr(params, "items"):
        kinds = type(grads).__name__, type(params).__name__
        refuse(f"{call}.update(grads, state, params)", "grads and params as dicts by name", kinds, TypeError)
    for key in params:
        gradient = grads.get(key)
        if gradient is None:
            raise ValueError(
                f"{call}.update: there is no gradient of {key!r}. Of a parameter that the loss does not use it is "
                "zero: metagrad.grad(..., materialize_grads=True) returns that."
            )
        if isinstance(gradient, RowSparse) and not takes_rows:
            raise TypeError(
                f"{call}.update: the gradient of {key!r} is RowSparse, and this rule moves every row. "
                "Make the gradient dense by .to_dense(), or train the table by mg.optim.SparseAdam."
            )
    return {key: grads[key] for key in params}


def _by_name(params: Params, rows: Sequence[Iterable[Any]], pattern: Iterable[object | None]) -> list[Any]:
    """Convert the values of each parameter to a dict for each slot. A slot is None if the pattern has None."""
    wanted = list(pattern)
    columns = list(zip(*rows, strict=True)) or [()] * len(wanted)
    return [
        None if like is None else dict(zip(params, column, strict=True))
        for like, column in zip(wanted, columns, strict=True)
    ]
