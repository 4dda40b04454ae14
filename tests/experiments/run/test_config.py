import json
from itertools import zip_longest
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf.errors import OmegaConfBaseException

from experiments.run.config import SCHEMAS, plain
from experiments.run.schema import Device

CONF = Path(__file__).parents[3] / "conf"
OF_OTHERS = {"preset", "problem", "tuned", "workload"}  # of other programs, whose tests compose them
OF_PLUGINS = {"launcher", "sweeper"}  # which test_sweeps composes
OPTIONS = [
    f"{file.parent.name}={file.stem}"
    for file in sorted(CONF.glob("*/*.yaml"))
    if file.parent.name not in {*OF_OTHERS, *OF_PLUGINS, "optimizer"}
] + [f"optimizer={name}" for name in SCHEMAS["optimizer"]]


# Required settings of tasks, as in their documentation.
DATA = {
    "task=fewshot": ["task.dataset._target_=mypackage.Data", "task.dataset.args={root:data}"],
    "task=folder": ["task.dataset.root=images"],
    "task=tabular": ["task.table=boys.csv", "task.task_column=Subject", "task.x=[age]", "task.y=height"],
}


def together(options):
    """Put options of different groups into one command line, except models and experiments, which depend on tasks."""
    groups = {}
    for option in options:
        groups.setdefault(option.partition("=")[0], []).append(option)
    alone = [[option] for group in ("model", "experiment") for option in groups.pop(group)]
    return alone + [[option for option in row if option] for row in zip_longest(*groups.values())]


# (experiment, ways, shots, meta-batch, inner steps in training, in the test, inner lr)
OMNIGLOT = [
    ("omniglot_5way1shot", 5, 1, 8, 1, 3, 0.4),
    ("omniglot_5way5shot", 5, 5, 8, 1, 3, 0.4),
    ("omniglot_20way1shot", 20, 1, 4, 5, 5, 0.1),
    ("omniglot_20way5shot", 20, 5, 4, 5, 5, 0.1),
    ("omniglot_5way1shot_paper", 5, 1, 32, 1, 3, 0.4),
    ("omniglot_20way1shot_paper", 20, 1, 16, 5, 5, 0.1),
]

WRONG = [
    ("seed=abc", "could not be converted to Integer"),
    ("algorithm.inner.lr=fast", "could not be converted to Float"),
    ("memory.enabled=perhaps", "not a valid bool"),
    ("device=tpu", "Invalid value 'tpu', expected one of"),
    ("logger.name=mlflow", "Invalid value 'mlflow', expected one of"),
    ("task.foo=1", "Key 'foo' not in 'Sinusoid'"),
    ("sede=1", "Key 'sede' not in 'Config'"),
]

COUNTS = [
    ("iterations=0", "iterations must be at least 1, got 0"),
    ("seed=-1", "seed must be at least 0, got -1"),
    ("seed=18446744073709551616", r"seed must be below 2\*\*63, got 18446744073709551616"),
    ("evaluate.tasks=1", "evaluate.tasks must be at least 2, got 1"),
]


def test_every_option_of_every_group_composes(composed):
    for options in together(OPTIONS):
        of_images = {"model=conv4", "model=resnet12", "model=transformer"}
        needed = ["task=omniglot"] if of_images & {*options} else []
        needed += [
            f"{option.partition('=')[0]}._target_=mypackage.Made" for option in options if "=custom" in option
        ]
        needed += [setting for option in options for setting in DATA.get(option, [])]
        config = composed(*options, *needed)
        assert json.loads(json.dumps(plain(config)))["device"] == "auto"


def test_the_options_are_found():
    groups = {option.partition("=")[0] for option in OPTIONS}
    assert groups == {"task", "model", "algorithm", "optimizer", "schedule", "logger", "experiment", "debug"}


@pytest.mark.parametrize("name", ["omniglot_20way1shot", "sinusoid"])
def test_the_inner_step_size_of_an_experiment_is_not_that_of_another_rule(composed, name):
    alone = composed("algorithm/inner=adam").algorithm.inner
    chosen = composed(f"experiment={name}", "algorithm/inner=adam").algorithm.inner
    assert plain(chosen) == plain(alone)
    assert composed(f"experiment={name}", "algorithm.inner.lr=0.25").algorithm.inner.lr == 0.25


@pytest.mark.parametrize(("name", "ways", "shots", "meta_batch", "steps", "test_steps", "lr"), OMNIGLOT)
def test_omniglot_protocols(composed, name, ways, shots, meta_batch, steps, test_steps, lr):
    config = composed(f"experiment={name}")
    assert (config.task.ways, config.task.shots, config.model.ways) == (ways, shots, ways)
    assert config.meta_batch == meta_batch
    assert (config.algorithm.steps, config.evaluate.steps) == (steps, test_steps)
    assert config.algorithm.inner.lr == lr
    assert config.evaluate.queries == 15


def test_an_override_beats_debug_beats_an_experiment(composed):
    config = composed("experiment=omniglot_5way1shot", "debug=fast", "meta_batch=3")
    assert (config.iterations, config.meta_batch, config.task.ways) == (4, 3, 5)


def test_values_have_their_types(composed):
    config = composed("device=cpu")
    assert config.device is Device.cpu
    assert type(config.optimizer.betas) is list


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_unknown_keys_and_wrong_types_are_refused(composed, override, message):
    with pytest.raises((ConfigCompositionException, OmegaConfBaseException)) as caught:
        composed(override)
    assert message in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("key", ["foo", "algorithm.inner.foo"])
def test_added_keys_are_refused(composed, key):
    with pytest.raises(ValueError, match=rf"there is no key {key}; the keys there are "):
        composed(f"+{key}=1")


def test_a_convolutional_model_of_sinusoids_is_refused(composed):
    with pytest.raises(ValueError, match=r"a task without classes has no task\.ways; give model\.ways=VALUE"):
        composed("model=conv4")


@pytest.mark.parametrize(("override", "message"), COUNTS)
def test_counts_that_make_no_sense_are_refused(composed, override, message):
    with pytest.raises(ValueError, match=message):
        composed(override)
