"""The schemas of algorithms: a key for each argument of their classes, those of `MAML` that they pass on included.

Types, defaults and the sentences of `--help` are those of the class; `conf/algorithm/` holds what differs, and why.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import Any

from experiments.run.schema import Algorithm, Hypergradient, InnerRule
from experiments.run.signatures import TYPES, option_name, schema_of

KINDS = {
    **TYPES,
    "str": Any,  # or a module, or a list
    "Rule": InnerRule,
    "Memory": str,
    "Nonfinite": str,
    "Sequence": list[str],
}
"""Types of keys by the first word of an annotation; the others may be anything, which the class checks."""

ALGORITHMS: dict[str, type[Algorithm]] = {
    name: schema_of(f"metagrad.{made}", Algorithm, types=KINDS, other=Any, without=("model", "loss_fn"))
    for name, made in {
        "maml": "MAML",
        "maml_plus_plus": "MAMLPlusPlus",
        "fomaml": "FOMAML",
        "reptile": "Reptile",
        "imaml": "iMAML",
        "anil": "ANIL",
        "boil": "BOIL",
        "meta_sgd": "MetaSGD",
        "meta_curvature": "MetaCurvature",
        "cavia": "CAVIA",
        "proto_maml": "ProtoMAML",
        "protonet": "ProtoNet",
        "r2d2": "R2D2",
    }.items()
}
"""Schemas by the name of the option of `algorithm`."""


HYPERGRADIENTS: dict[str, type[Hypergradient]] = {
    option_name(made): schema_of(f"metagrad.hypergrad.{made}", Hypergradient)
    for made in ("CG", "Neumann", "Exact", "FirstOrder")
}
"""Schemas by the name of the option of `algorithm/hypergradient`."""


def own_keys(config: Algorithm) -> set[str]:
    """Return the keys that are arguments of the algorithm."""
    return {item.name for item in fields(config) if "inherited" in item.metadata or item.name == "args"}


def given(config: Algorithm) -> dict[str, Any]:
    """Return the target and its arguments, without those that are passed on to `MAML` at their default."""
    own, settings = own_keys(config), asdict(config)
    left = {
        item.name for item in fields(config) if item.metadata.get("inherited") and _is_default(config, item)
    }
    return {name: value for name, value in settings.items() if name in own - left or name == "_target_"}


def _is_default(config: Algorithm, item: Any) -> bool:
    default = item.default_factory() if item.default is MISSING else item.default
    return getattr(config, item.name) == default
