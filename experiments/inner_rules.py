"""The rules of `metagrad.optim.rules` as options of `algorithm/inner`: their keys are the arguments of each rule.

`sgd` has a default learning rate here; of every other rule all defaults are its own. Rules that are made of others
(`chain`, `lookahead`, `mask`, `rowwise`, `schedule`) are given by `algorithm/inner=custom`, and `muon`, which takes
matrices alone, is such a one in `conf/algorithm/inner/muon.yaml`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import Field, field, make_dataclass
from typing import Any, Optional

from omegaconf import MISSING

from experiments.schema import InnerRule, key
from metagrad.optim import rules
from metagrad.optim.rule import documented_fields

DEFAULTS = {"sgd": {"lr": 0.01}}
LEFT_OUT = ("maximize",)
TYPES: dict[str, Any] = {
    "Hyperparameter": float,
    "float": float,
    "int": int,
    "bool": bool,
    "Literal": str,
    "tuple": list[float],
}
"""Types of keys by the beginning of an annotation; arguments of other types have no key."""


def schema_of(name: str) -> type[InnerRule]:
    """Return the schema of a rule."""
    keys = [
        (
            "_target_",
            str,
            key("What is built: a rule of metagrad.optim.rules.", f"metagrad.optim.rules.{name}"),
        )
    ]
    for argument in documented_fields(getattr(rules, name)):
        kind = _type(argument)
        if kind is not None and argument.name not in LEFT_OUT:
            default = DEFAULTS.get(name, {}).get(argument.name, argument.default)
            keys.append((argument.name, kind, _field(default)))
    return make_dataclass(f"{name}_rule", keys, bases=(InnerRule,))


def _type(argument: Field[Any]) -> Any:
    words = str(argument.type).replace("[", " ").split()
    kind = TYPES.get(words[0])
    return Optional[kind] if kind is not None and words[-1] == "None" else kind  # noqa: UP045  # made at run time


def _field(default: Any) -> Any:
    if isinstance(default, tuple):
        return field(default_factory=lambda: list(default))
    return field(default=MISSING if default is dataclasses.MISSING else default)


def is_rule(name: str) -> bool:
    """Say whether a public name is a rule by itself."""
    made = getattr(rules, name)
    return isinstance(made, type) and "lr" in getattr(made, "hyper", ())


INNER_RULES = {name: schema_of(name) for name in rules.__all__ if is_rule(name) and name != "muon"}
"""Schemas by the name of the rule."""
