"""`--help` of a program: a sentence for each of its groups and keys, with the values that the command line composes.

The sentence of a key is in the metadata of its field. The sentence of an argument of a target is in the target's
docstring.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments.run.files import command_of

CONF = Path(__file__).parents[2] / "conf"
WIDTH = 118
GROUPS = {
    "task": "what is learned from",
    "model": "the network",
    "algorithm": "the meta-learner",
    "algorithm/inner": "the rule of the inner loop",
    "algorithm/hypergradient": "the derivative of the minimum that the inner steps lead to",
    "optimizer": "what moves the initialisation, or the model",
    "schedule": "the learning rate over the iterations",
    "logger": "where metrics are mirrored",
    "launcher": "where the jobs of a sweep run",
    "sweeper": "which values a sweep takes",
    "experiment": "a protocol, many values at once; values beside it win",
    "debug": "shorter or more careful runs",
    "preset": "small: the whole program in less than a minute",
}
HEAD = """\
{command} [GROUP=OPTION ...] [KEY=VALUE ...] [-m]

-m runs a sweep: KEY=VALUE,VALUE takes one value after the other, and 'GROUP=glob(*)' one option after the other.
--cfg job prints the configuration as YAML; --hydra-help says what Hydra can do besides.
"""


def default_logger() -> str:
    """Return `wandb` if wandb has a key, a login or WANDB_MODE, else `csv`."""
    is_set = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")
    logins = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return "wandb" if is_set or (logins.is_file() and "wandb" in logins.read_text()) else "csv"


OmegaConf.register_new_resolver("default_logger", default_logger, replace=True)


def text(name: str, module: str, arguments: list[str]) -> str:
    """Return the text that `--help` prints.

    Args:
        name: The config of the program, `conf/NAME.yaml`.
        module: The module that starts it, such as `experiments.train`.
        arguments: The command line, whose overrides change the values shown.
    """
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(name, overrides, return_hydra_config=True)
    choices = config.hydra.runtime.choices
    groups = [_group(group, choices[group]) for group in GROUPS if group in choices]
    return "\n".join(
        [
            HEAD.format(command=command_of(module)),
            "Groups (* is chosen):",
            *groups,
            "\nKeys, with their values:",
            *_keys(config),
        ]
    )


def arguments_of(target: str) -> dict[str, str]:
    """Return the first sentence about each argument in the docstring of a class or function."""
    try:
        said = inspect.getdoc(get_object(target)) or ""
    except Exception:  # building the target raises the error later
        return {}
    block = re.split(r"\n(?=\S)", said.partition("Args:\n")[2])[0]
    entries = re.findall(r"^ {2,4}\*{0,2}(\w+)(?: \(.*?\))?: *((?:.|\n {5,})*)", block, re.MULTILINE)
    return {name: first_sentence(words) for name, words in entries}


def first_sentence(words: str) -> str:
    """Return the first sentence of a docstring, on one line and without markup."""
    sentence = re.split(r"(?<=[.])\s|\n\n|\(default", " ".join(words.split("\n\n")[0].split()))[0].rstrip(
        " .;,"
    )
    plain = re.sub(r":\w+:`~?([^`]*)`", r"\1", sentence).replace("``", "").replace("\\", "")
    return f"{plain[:1].upper()}{plain[1:]}." if plain else ""


def _group(group: str, chosen: object) -> str:
    options = ", ".join(f"{option}*" if option == chosen else option for option in _options(group))
    line = f"{group}: {GROUPS[group]}: {options}"
    return textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="      ")


def _options(group: str) -> list[str]:
    stored = ConfigStore.instance().repo
    for part in group.split("/"):
        stored = stored.get(part, {})
    names = {Path(name).stem for name in stored if name.endswith(".yaml")}
    return sorted(names | {file.stem for file in (CONF / group).glob("*.yaml")})


def _keys(node: DictConfig, path: str = "") -> Iterator[str]:
    """Yield a line for each key of a node, and then the lines of its child nodes."""
    said, inner = _said(node), []
    for key in map(str, node):
        value = None if OmegaConf.is_missing(node, key) else node[key]
        if isinstance(value, DictConfig) and key != "args":
            inner.append((f"{path}{key}", value))
        elif key != "_partial_":
            yield _line(
                f"{path}{key}", "???" if OmegaConf.is_missing(node, key) else value, said.get(key, "")
            )
    for name, value in inner:
        if name != "hydra":
            yield ""
            yield from _keys(value, f"{name}.")


def _said(node: DictConfig) -> dict[str, str]:
    schema = OmegaConf.get_type(node)
    own = (
        {}
        if schema in (None, dict)
        else {field.name: field.metadata.get("help", "") for field in fields(schema)}
    )
    is_target = "_target_" in node and not OmegaConf.is_missing(node, "_target_")
    told = arguments_of(node["_target_"]) if is_target else {}
    return {**told, **{name: sentence for name, sentence in own.items() if sentence}}


def _line(key: str, value: object, sentence: str) -> str:
    plain = OmegaConf.to_container(value) if isinstance(value, (DictConfig, ListConfig)) else value
    is_word = plain is None or isinstance(plain, bool)
    left = f"  {key} = {json.dumps(plain) if is_word else getattr(plain, 'name', plain)}"
    if not sentence:
        return left
    return textwrap.fill(f"{left.ljust(40)}  # {sentence}", WIDTH, subsequent_indent=" " * 44)
