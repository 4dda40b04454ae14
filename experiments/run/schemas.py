"""Schemas made of signatures: a key for each argument, with its type, default and docstring sentence."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, field, fields, make_dataclass
from typing import Any, NamedTuple, Optional

import torch
from hydra.utils import get_object
from omegaconf import MISSING

from experiments.run.help import arguments_of
from experiments.run.schema import (
    Algorithm,
    Data,
    Hypergradient,
    InnerRule,
    Model,
    Optimizer,
    Target,
    Task,
    key,
)
from metagrad import optim
from metagrad.meta import Options
from metagrad.optim import rules

TYPES: dict[str, Any] = {
    "Hyperparameter": float,
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "Literal": str,
    "tuple": list[float],
}
"""Types of keys by the beginning of an annotation."""


class Argument(NamedTuple):
    """An argument of a class or a function."""

    name: str
    annotation: str
    default: Any
    sentence: str
    inherited: bool  # whether it is an argument of the base class, passed on by `**arguments`


def arguments(make: Any, inherited: bool = False) -> Iterator[Argument]:
    """Yield the arguments of a class or a function, and then the arguments that it passes on to its base class."""
    sentences, passes_on = arguments_of(f"{make.__module__}.{make.__qualname__}"), False
    for name, argument in inspect.signature(make).parameters.items():
        if argument.kind is inspect.Parameter.VAR_KEYWORD:
            takes_options = isinstance(make, type) and "read_options" in make.__init__.__code__.co_names
            if takes_options:
                yield from arguments(Options, inherited)
            passes_on = isinstance(make, type) and not takes_options
        else:
            words = argument.annotation
            text = words if isinstance(words, str) else inspect.formatannotation(words)
            yield Argument(name, text, argument.default, sentences.get(name, ""), inherited)
    if passes_on:
        above = next(parent for parent in make.__mro__[1:] if "__init__" in vars(parent))
        chosen = _chosen_by(make)
        yield from (one for one in arguments(above, inherited=True) if one.name not in chosen)


def _chosen_by(make: type) -> set[str]:
    """Return the arguments of the base class that a class sets in its call of `super().__init__`."""
    calls = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(make.__init__))))
    above = (
        call for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
    )
    return {word.arg for call in above for word in call.keywords if word.arg is not None}


def schema_of(
    target: str,
    base: type[Target],
    *,
    types: Mapping[str, Any] = TYPES,
    other: Any = None,
    without: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> type[Any]:
    """Return the schema of a class: a key for each argument that its docstring explains.

    Args:
        target: Dotted name of the class or function.
        base: The schema that it extends.
        types: Types of keys by the first word of an annotation.
        other: The type of the other keys. None omits these keys.
        without: Arguments that have no key.
        defaults: Defaults, if they differ from the defaults of the class.
    """
    make = get_object(target)
    keys: dict[str, tuple[str, Any, Any]] = {"_target_": ("_target_", str, key("What is built.", target))}
    for argument in arguments(make):
        kind = _type(argument.annotation, types, other)
        if kind is not None and argument.sentence and argument.name not in (*keys, *without):
            default = (defaults or {}).get(argument.name, argument.default)
            keys[argument.name] = (argument.name, kind, _field(default, argument))
    return make_dataclass(make.__name__, list(keys.values()), bases=(base,))


def option_name(name: str) -> str:
    """Return the name of a class in snake case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _type(annotation: str, types: Mapping[str, Any], other: Any) -> Any:
    words = annotation.replace("[", " ").split()
    is_number = words[0] == "Literal" and not {"'", '"'} & set(annotation)
    kind = int if is_number else types.get(words[0], other)
    return Optional[kind] if kind is not None and words[-1] == "None" else kind  # noqa: UP045  # made at run time


def _field(default: Any, argument: Argument) -> Any:
    metadata = {"help": argument.sentence, "inherited": argument.inherited}
    if isinstance(default, (tuple, list)):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=MISSING if default is inspect.Parameter.empty else default, metadata=metadata)


ALGORITHM_KINDS = {
    **TYPES,
    "str": Any,  # or a module, or a list
    "Rule": InnerRule,
    "Memory": str,
    "Nonfinite": str,
    "Sequence": list[str],
}
"""Types of keys by the first word of an annotation. The other keys accept any value, which the class checks."""

ALGORITHMS: dict[str, type[Algorithm]] = {
    name: schema_of(
        f"metagrad.{made}", Algorithm, types=ALGORITHM_KINDS, other=Any, without=("model", "loss_fn")
    )
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
    """Return the target and its arguments, without arguments of `MAML` that have their default."""
    own, settings = own_keys(config), asdict(config)
    left = {
        item.name for item in fields(config) if item.metadata.get("inherited") and _is_default(config, item)
    }
    return {name: value for name, value in settings.items() if name in own - left or name == "_target_"}


def _is_default(config: Algorithm, item: Any) -> bool:
    default = item.default_factory() if item.default is dataclasses.MISSING else item.default
    return getattr(config, item.name) == default


TASK_KINDS = {
    **TYPES,
    "Callable": Any,
    "Count": Any,
    "Dataset": Data,
    "Inputs": Any,
    "Range": list[float],
    "Sequence": Any,
}
"""Types of keys by the first word of an annotation. A `Count` is a number or a pair, `Inputs` columns of a table."""

TASKS: dict[str, type[Task]] = {
    name: schema_of(f"metagrad.tasks.{made}", Task, types=TASK_KINDS)
    for name, made in {
        "sinusoid": "Sinusoid",
        "omniglot": "Omniglot",
        "fewshot": "FewShot",
        "folder": "FewShot",
        "gaussian_process": "GaussianProcess",
        "harmonic": "Harmonic",
        "lines": "Lines",
        "sinusoid_or_line": "SinusoidOrLine",
        "step_functions": "StepFunctions",
        "tabular": "Tabular",
    }.items()
}
"""Schemas by the name of the option of `task`."""

MODELS: dict[str, type[Model]] = {
    name: schema_of(f"metagrad.models.{made}", Model, types={**TYPES, "Sequence": list[int]})
    for name, made in {
        "mlp": "MLP",
        "context_mlp": "ContextMLP",
        "conv4": "Conv4",
        "resnet12": "ResNet12",
        "transformer": "Transformer",
    }.items()
}
"""Schemas by the name of the option of `model`."""

DATASETS: dict[str, type[Data]] = {
    "folders": schema_of("metagrad.tasks.ImageFolders", Data, types=TASK_KINDS)
}
"""Schemas of the data sets and parts of few-shot tasks."""


LEFT_OUT = ("maximize", "foreach", "capturable", "differentiable", "fused", "group")
"""Arguments that a program does not use, and the process group, which the run already knows."""


def _fits(name: str) -> bool:
    """Return whether the outer loop can use an optimizer. KFAC needs a model, and Muon accepts only matrices."""
    made = getattr(optim, name)
    is_optimizer = isinstance(made, type) and issubclass(made, torch.optim.Optimizer)
    return is_optimizer and made is not optim.Muon and "model" not in inspect.signature(made).parameters


def _option(name: str) -> str:
    """Return the name of a class in snake case, or the name of its functional form or of its paper."""
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
