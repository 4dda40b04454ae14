"""Convert Hydra's composed config to a typed config, and check it once."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue

from experiments.run.help import CONF
from experiments.run.schema import (
    Config,
    Constant,
    Cosine,
    Custom,
    CustomAlgorithm,
    CustomData,
    CustomModel,
    CustomOptimizer,
    CustomRule,
    CustomTask,
    Hypergradient,
    InnerRule,
    Logger,
    Loss,
    Optimizer,
)
from experiments.run.schemas import (
    ALGORITHMS,
    DATASETS,
    HYPERGRADIENTS,
    INNER_RULES,
    MODELS,
    OPTIMIZERS,
    TASKS,
    own_keys,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

SCHEMAS: dict[str, dict[str, type]] = {
    "task": {**TASKS, "custom": CustomTask},
    "task/dataset": {**DATASETS, "custom": CustomData},
    "loss": {"loss": Loss},
    "model": {**MODELS, "custom": CustomModel},
    "algorithm": {**ALGORITHMS, "custom": CustomAlgorithm},
    "algorithm/hypergradient": HYPERGRADIENTS,
    "algorithm/inner": {**INNER_RULES, "custom": CustomRule},
    "optimizer": {**OPTIMIZERS, "custom": CustomOptimizer},
    "schedule": {"constant": Constant, "cosine": Cosine},
    "logger": {"logger": Logger},
}


@functools.cache
def register() -> None:
    """Store the schemas, once, where the defaults lists of `conf/` find them, as `schema/GROUP/NAME`.

    The schemas of optimizers are options themselves, with the defaults of the library, unless `conf/` has a file of
    the same name.
    """
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, schemas in SCHEMAS.items():
        for name, node in schemas.items():
            store.store(name, _open(node), f"schema/{group}", package=group.replace("/", "."))
            if (
                issubclass(node, (InnerRule, Optimizer, Hypergradient))
                and not (CONF / group / f"{name}.yaml").exists()
            ):
                store.store(name, node, group)


def _open(schema: type) -> Any:
    """Return a schema that accepts any key in the `args` of a custom target."""
    node = OmegaConf.structured(schema)
    if issubclass(schema, Custom):
        OmegaConf.set_struct(node.args, False)
    return node


def composed(name: str, overrides: list[str]) -> DictConfig:
    """Compose the config of a program. This also works while another program runs."""
    register()
    is_ready = GlobalHydra.instance().is_initialized()
    with nullcontext() if is_ready else initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides)


def typed(config: DictConfig) -> Config:
    """Resolve a composed config, check it, and return it as a `Config`.

    Raises:
        ValueError: A key is not in the schema, or a count is too small.
    """
    resolved = converted("train", config)
    check_counts("train", resolved)
    settle("train", resolved)
    return resolved


def converted(call: str, config: DictConfig) -> Any:
    """Return a composed config as objects of its schema.

    Raises:
        ValueError: A value is missing, or a key is not in the schema.
    """
    try:
        resolved: Any = OmegaConf.to_object(config)
    except MissingMandatoryValue as error:
        raise ValueError(f"{call}: {error.full_key} has no value; give {error.full_key}=VALUE.") from error
    except InterpolationKeyError as error:
        raise ValueError(
            f"{call}: {error.full_key} takes its value from another key that is not there, as a task without classes "
            f"has no task.ways; give {error.full_key}=VALUE, or choose another task or model."
        ) from error
    check_keys(call, resolved)
    folder = getattr(resolved, "folder", None)
    if folder is not None and HydraConfig.initialized() and HydraConfig.get().run.dir != folder:
        raise ValueError(
            f"{call}: give folder=FOLDER instead of hydra.run.dir, which only chooses where a log is."
        )
    return resolved


def plain(config: Config) -> dict[str, Any]:
    """Return the config as nested dicts of JSON values."""
    return _plain(asdict(config))


def settle(call: str, config: Config) -> None:
    """Set the inner rule and the steps that an experiment chooses to null if the algorithm does not have them.

    Raises:
        ValueError: The inner rule is not gradient descent, so the user has chosen it.
    """
    algorithm, own = config.algorithm, own_keys(config.algorithm)
    if "args" in own:
        return
    if "inner" not in own and algorithm.inner is not None:
        if not algorithm.inner._target_.endswith(".sgd"):
            raise ValueError(
                f"{call}: {algorithm._target_} has no inner rule, so algorithm/inner cannot be "
                f"{algorithm.inner._target_.rpartition('.')[2]}; leave it out."
            )
        algorithm.inner = None
    if "steps" not in own:
        algorithm.steps = config.evaluate.steps = None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.name if isinstance(value, Enum) else value


def check_keys(call: str, node: Any, prefix: str = "") -> None:
    """Raise `ValueError` for keys added by `+key=value`, which Hydra accepts."""
    known = [item.name for item in fields(node)]
    for name, value in vars(node).items():
        if name not in known:
            raise ValueError(
                f"{call}: there is no key {prefix}{name}; the keys there are {', '.join(known)}."
            )
        if is_dataclass(value):
            check_keys(call, value, f"{prefix}{name}.")


def check_counts(call: str, node: Any, prefix: str = "") -> None:
    """Raise `ValueError` if an integer of a config, or of a list in it, is below its least value or above 64 bits."""
    for item in fields(node):
        value, name = getattr(node, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            check_counts(call, value, f"{name}.")
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int) and not isinstance(one, bool) and "least" in item.metadata:
                check_least(call, {name: (one, item.metadata["least"])})


def check_least(call: str, least: dict[str, tuple[int, int]]) -> None:
    """Raise `ValueError` unless every count, by name, is at least its minimum and fits into 64 bits."""
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise ValueError(f"{call}: {name} must be at least {smallest}, got {value}.")
        if value >= 2**63:
            raise ValueError(f"{call}: {name} must be below 2**63, got {value}.")
