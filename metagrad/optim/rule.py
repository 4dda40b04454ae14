"""Rules: functional optimizers, as in optax, also for stacked tasks."""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from torch import Tensor
from typing_extensions import dataclass_transform

from metagrad.core._torch import pytree
from metagrad.core.tree import Params

Hyperparameter: TypeAlias = "float | Tensor | Mapping[str, float | Tensor] | Sequence[Any]"
"""A value (number or 0-d tensor), a value for each step (1-d tensor or sequence), or a value for each parameter.

Values for parameters are a mapping by name. Each is a number, a 0-d tensor, or a tensor in the parameter's shape."""

R = TypeVar("R")


def hyperparameter(*, default: Any = dataclasses.MISSING, below: float = math.inf) -> Any:
    """Declare a field of a rule that is a hyperparameter, which may be a tensor that requires grad.

    Args:
        default: Default value. Without a default, the argument is required.
        below: Upper bound of a number, exclusive. The lower bound is 0.
    """
    return dataclasses.field(default=default, metadata={"below": below})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(hyperparameter,))
def functional_optimizer(cls: type[R]) -> type[R]:
    """Make a class of declared fields a rule: a frozen dataclass."""
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    below = {field.name: field.metadata["below"] for field in fields if field.metadata}
    cls.hyper, cls.below = tuple(below), below  # type: ignore[attr-defined]
    cls.values = namedtuple("values", _each_named(cls, below))  # type: ignore[attr-defined]
    return cls


def _each_named(cls: type, names: Iterable[str]) -> Iterator[str]:
    """Yield names, with ``betas`` expanded to ``beta1``, ``beta2`` and so on."""
    for name in names:
        yield from (f"beta{i + 1}" for i in range(len(cls.betas))) if name == "betas" else (name,)  # type: ignore[attr-defined]


class Rule(Protocol):
    """A functional optimizer, as in optax: a frozen dataclass of hyperparameters with two pure functions.

    An elementwise rule works unchanged on stacked tasks. A rule with matrices or norms declares a field ``batch_ndim:
    int = 0``, the number of leading axes of each parameter that count tasks. :func:`with_batch_ndim` sets this field
    everywhere in a rule.
    """

    def init(self, params: Params) -> Any:
        """Return the state before the first step, a pytree of tensors and constants."""
        ...

    def update(self, grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        """Return new parameters and a new state, both differentiable. Nothing is written in place."""
        ...


class Transform(Protocol):
    """A transform of the gradients in a :func:`chain`, before its optimizer."""

    def init(self, params: Params) -> Any:
        """Return the state before the first step, a pytree of tensors and constants."""
        ...

    def transform(self, grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        """Return new gradients and a new state, both differentiable. Nothing is written in place."""
        ...


class RuleNode:
    """A rule, or a part of one, that is a node of torch's pytrees.

    So functions of pytrees (``unroll``, ``torch.func``, a compiled loop) find the hyperparameters of a rule and of
    its parts. Subclasses are frozen dataclasses. Fields other than ``hyper`` and ``nested`` are structure: flags,
    counts, names and functions.
    """

    hyper: ClassVar[tuple[str, ...]] = ()
    """The fields that are hyperparameters."""
    below: ClassVar[Mapping[str, float]] = {}
    """Upper bounds of their numbers, exclusive."""
    values: ClassVar[type]
    """A named tuple with a number or tensor for each hyperparameter. ``betas`` are ``beta1``, ``beta2`` and so on."""
    nested: ClassVar[tuple[str, ...]] = ()
    """The fields that are pytrees of rules or constants."""

    def __init_subclass__(cls, **keywords: object) -> None:
        super().__init_subclass__(**keywords)
        pytree.register_pytree_node(
            cls,
            _flatten,
            lambda children, context: _unflatten(cls, children, context),
            flatten_with_keys_fn=_flatten_with_keys,  # type: ignore[reportArgumentType]
        )


def _flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
    leaves = (*node.hyper, *node.nested)
    names = [field.name for field in dataclasses.fields(node)]
    # A mapping of another kind would be a leaf: nn.ParameterDict is one.
    children = [_plain(getattr(node, name)) for name in names if name in leaves]
    return children, tuple((name, None if name in leaves else getattr(node, name)) for name in names)


def _flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    children, context = _flatten(node)
    keys = [pytree.GetAttrKey(name) for name, _ in context if name in (*node.hyper, *node.nested)]
    return list(zip(keys, children, strict=True)), context


def _unflatten(cls: Any, children: Any, context: tuple[Any, ...]) -> Any:
    supply = iter(children)
    leaves = (*cls.hyper, *cls.nested)
    return cls(**{name: next(supply) if name in leaves else static for name, static in context})


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def with_batch_ndim(rule: R, batch_ndim: int) -> R:
    """Return a rule for parameters whose first ``batch_ndim`` axes count tasks.

    Args:
        rule: Any rule, including chains and other compositions.
        batch_ndim: 1 for parameters ``[tasks, ...]``, 0 for parameters of one task.

    Returns:
        The rule, with every field ``batch_ndim`` set. An elementwise rule has no such field and is returned
        unchanged.

    Example:
        >>> from metagrad.optim.rule import with_batch_ndim
        >>> rules = metagrad.optim.rules
        >>> stacked = with_batch_ndim(rules.chain(rules.clip_by_norm(1.0), rules.sgd(1.0)), 1)
        >>> params = {"w": torch.zeros(2, 2)}
        >>> gradients = {"w": torch.tensor([[0.0, 4.0], [0.5, 0.0]])}
        >>> stacked.update(gradients, stacked.init(params), params)[0]["w"]
        tensor([[ 0.0000, -1.0000],
                [-0.5000,  0.0000]])
    """
    if isinstance(rule, tuple):
        parts = tuple(with_batch_ndim(part, batch_ndim) for part in rule)
        return rule if all(new is old for new, old in zip(parts, rule, strict=True)) else parts  # type: ignore[return-value]
    if not dataclasses.is_dataclass(rule) or isinstance(rule, type):
        return rule
    changes = {}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        new = batch_ndim if field.name == "batch_ndim" else with_batch_ndim(value, batch_ndim)
        if new is not value:
            changes[field.name] = new
    return dataclasses.replace(rule, **changes) if changes else rule
