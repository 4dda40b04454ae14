"""The schemas of optimizers, of the outer loop and the inner: a key for each argument that their docstring explains.

Keys, types, defaults and the sentences of `--help` are those of the class that is built; `conf/optimizer/` and
`conf/algorithm/inner/` hold what differs, and why. Rules that are made of others (`chain`, `lookahead`, `mask`,
`rowwise`, `schedule`) are given by `algorithm/inner=custom`.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field, make_dataclass
from typing import Any, Optional

import torch
from hydra.utils import get_object
from omegaconf import MISSING

from experiments.help import arguments_of
from experiments.schema import InnerRule, Optimizer, Target, key
from metagrad import optim
from metagrad.optim import rules

LEFT_OUT = ("maximize", "foreach", "capturable", "differentiable", "fused", "curvature_fraction")
"""Arguments that no program has a use for."""
TYPES: dict[str, Any] = {
    "Hyperparameter": float,
    "float": float,
    "int": int,
    "bool": bool,
    "Literal": str,
    "tuple": list[float],
}
"""Types of keys by the beginning of an annotation; arguments of other types have no key."""


def schema_of(target: str, base: type[Target], **defaults: Any) -> type[Any]:
    """Return the schema of a class.

    Args:
        target: Its dotted name.
        base: The schema that it extends.
        defaults: Defaults that differ from those of the class.
    """
    make, sentences = get_object(target), arguments_of(target)
    keys = [("_target_", str, key("What is built.", target))]
    for name, argument in inspect.signature(make).parameters.items():
        kind = _type(argument.annotation)
        if kind is not None and name in sentences and name not in LEFT_OUT:
            keys.append((name, kind, _field(defaults.get(name, argument.default), sentences[name])))
    return make_dataclass(make.__name__, keys, bases=(base,))


def _type(annotation: Any) -> Any:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    words = text.replace("[", " ").split()
    kind = TYPES.get(words[0])
    return Optional[kind] if kind is not None and words[-1] == "None" else kind  # noqa: UP045  # made at run time


def _field(default: Any, sentence: str) -> Any:
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default), metadata={"help": sentence})
    return key(sentence, MISSING if default is inspect.Parameter.empty else default)


@dataclass
class OfModel(Optimizer):
    """An optimizer that is made of a model, whose layers it observes."""


@dataclass
class OfCurvature(Optimizer):
    """An optimizer whose step takes a closure for the curvature."""

    curvature_batch: int | None = key(
        "Examples of a batch whose curvature is taken; null is all. experiments.optimizers.", None
    )


@dataclass
class OfMatrices(Optimizer):
    """An optimizer of the matrices of hidden layers, and another one, Adam, for the `rest`."""

    rest: Optimizer = field(default_factory=schema_of("torch.optim.Adam", Optimizer))


def _base_of(make: type[torch.optim.Optimizer]) -> type[Optimizer]:
    if "model" in inspect.signature(make).parameters:
        return OfModel
    if "curvature" in inspect.signature(make.step).parameters:
        return OfCurvature
    return OfMatrices if make is optim.Muon else Optimizer


def _option(name: str) -> str:
    """Return a class's name in snake case, or as its functional form has it."""
    return (
        name.lower() if name.lower() in rules.__all__ else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    )


def _is_optimizer(made: object) -> bool:
    return isinstance(made, type) and issubclass(made, torch.optim.Optimizer)


def _is_rule(made: object) -> bool:
    return isinstance(made, type) and "lr" in getattr(made, "hyper", ())


OPTIMIZERS: dict[str, type[Optimizer]] = {
    **{name.lower(): schema_of(f"torch.optim.{name}", Optimizer) for name in ("SGD", "Adam", "AdamW")},
    **{
        _option(name): schema_of(f"metagrad.optim.{name}", _base_of(getattr(optim, name)))
        for name in optim.__all__
        if _is_optimizer(getattr(optim, name))
    },
}
"""Schemas by the name of the option of `optimizer`."""

RULE_DEFAULTS = {"sgd": {"lr": 0.01}}
INNER_RULES: dict[str, type[InnerRule]] = {
    name: schema_of(f"metagrad.optim.rules.{name}", InnerRule, **RULE_DEFAULTS.get(name, {}))
    for name in rules.__all__
    if _is_rule(getattr(rules, name))
}
"""Schemas by the name of the option of `algorithm/inner`."""
