"""The schemas of optimizers, of the outer loop and the inner: a key for each argument that their docstring explains.

Keys, types, defaults and the sentences of `--help` are those of the class that is built; `conf/optimizer/` and
`conf/algorithm/inner/` hold what differs, and why. Rules that are made of others (`chain`, `mask`,
`schedule`) are given by `algorithm/inner=custom`.
"""

from __future__ import annotations

import inspect

import torch

from experiments.run.schema import InnerRule, Optimizer
from experiments.run.signatures import option_name, schema_of
from metagrad import optim
from metagrad.optim import rules

LEFT_OUT = ("maximize", "foreach", "capturable", "differentiable", "fused", "group")
"""Arguments that no program has a use for, and the processes of a run, which it knows by itself."""


def _fits(name: str) -> bool:
    """Return whether the outer loop can use an optimizer: it has no model, whose layers KFAC observes, and biases."""
    made = getattr(optim, name)
    is_optimizer = isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    return is_optimizer and made is not optim.Muon and "model" not in inspect.signature(made).parameters


def _option(name: str) -> str:
    """Return a class's name in snake case, or as its functional form or its paper has it."""
    return name.lower() if name.lower() in ("adahessian", *rules.__all__) else option_name(name)


def _is_rule(made: object) -> bool:
    return isinstance(made, type) and "lr" in getattr(made, "hyper", ())


OPTIMIZERS: dict[str, type[Optimizer]] = {
    **{
        name.lower(): schema_of(f"torch.optim.{name}", Optimizer, without=LEFT_OUT)
        for name in ("SGD", "Adam", "AdamW")
    },
    **{
        _option(name): schema_of(f"metagrad.optim.{name}", Optimizer, without=LEFT_OUT)
        for name in optim.__all__
        if _fits(name)
    },
}
"""Schemas by the name of the option of `optimizer`."""

RULE_DEFAULTS = {"sgd": {"lr": 0.01}}
INNER_RULES: dict[str, type[InnerRule]] = {
    name: schema_of(
        f"metagrad.optim.rules.{name}", InnerRule, without=LEFT_OUT, defaults=RULE_DEFAULTS.get(name)
    )
    for name in rules.__all__
    if _is_rule(getattr(rules, name))
}
"""Schemas by the name of the option of `algorithm/inner`."""
