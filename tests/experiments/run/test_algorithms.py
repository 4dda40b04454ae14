"""Every option of `algorithm`: it composes with every experiment, and trains."""

import json

import pytest
import torch
import yaml

from experiments.run.build import build_parts
from experiments.run.config import plain
from experiments.run.help import CONF
from experiments.run.schemas import ALGORITHMS, HYPERGRADIENTS, given
from metagrad.meta import Algorithm
from metagrad.tasks import Batch, Examples
from tests.marks import fast

TINY = (
    "task=custom",
    f"task._target_={__name__}.Corners",
    "loss._target_=torch.nn.functional.cross_entropy",
    "model=transformer",
    "model.outputs=3",
    "model.input_shape=[1,4,4]",
    "model.patch=2",
    "model.width=4",
    "model.heads=2",
    "model.depth=1",
    "allow=[tests.]",
    "iterations=2",
    "algorithm.steps=2",
    "memory.enabled=false",
)
OPTIONS = sorted(file.stem for file in CONF.glob("algorithm/*.yaml") if file.stem != "custom")


class Corners:
    """Tasks of three classes: images with one bright corner each, as often as the other two."""

    def sample(self, num_tasks, *, generator=None):
        images = 0.3 * torch.randn(2, num_tasks, 6, 1, 4, 4, generator=generator)
        labels = torch.arange(3).repeat_interleave(2).expand(num_tasks, 6)
        images[:, :, 0:2, :, :2, :2] += 1
        images[:, :, 2:4, :, 2:, :2] += 1
        images[:, :, 4:6, :, :2, 2:] += 1
        return Batch(*(Examples(part, labels) for part in images))


@pytest.mark.parametrize("name", fast(("meta_sgd", "protonet"), OPTIONS))
def test_experiments_are_for_every_algorithm(composed, name):
    needed = {"cavia": "context=8", "maml_plus_plus": "norm=running"}
    own = [f"model.{needed[name]}"] if name in needed else []
    config = composed("experiment=omniglot_20way1shot", f"algorithm={name}", "device=cpu", *own)
    assert isinstance(build_parts(config).algorithm, Algorithm)
    assert json.loads(json.dumps(plain(config)))["algorithm"]["_target_"] == config.algorithm._target_


def test_files_hold_what_differs_from_the_class():
    for name in OPTIONS:
        file = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text())
        schema = ALGORITHMS.get(name, ALGORITHMS["maml"])
        keys = {key for key in file if key not in ("defaults", "_target_")}
        assert not [key for key in keys if getattr(schema, key, None) == file[key]]


@pytest.mark.parametrize("name", fast(("first_order",), HYPERGRADIENTS))
def test_the_derivative_of_a_minimum_is_by_any_method(composed, name):
    config = composed("algorithm=imaml", f"algorithm/hypergradient={name}", "device=cpu")
    method = build_parts(config).module.hypergradient
    assert plain(config)["algorithm"]["hypergradient"]["_target_"].endswith(type(method).__name__)


def test_meta_sgd_starts_from_the_step_size_of_the_experiment(composed):
    config = composed("experiment=omniglot_5way1shot", "algorithm=meta_sgd")
    assert (config.algorithm.lr, config.algorithm.inner) == (0.4, None)
    parts = build_parts(composed("algorithm=meta_sgd", "algorithm.lr=0.25", "device=cpu"))
    assert (parts.module.get_parameter("inner_lr_0_bias") == 0.25).all()


def test_an_inner_rule_of_an_algorithm_without_one_is_refused(composed):
    with pytest.raises(ValueError, match=r"MetaSGD has no inner rule, so algorithm/inner cannot be adam"):
        composed("algorithm=meta_sgd", "algorithm/inner=adam")


def test_what_a_class_passes_on_is_given_where_it_is_set(composed):
    assert "task_chunk" not in given(composed("algorithm=meta_curvature").algorithm)
    assert given(composed("algorithm=meta_curvature", "algorithm.task_chunk=1").algorithm)["task_chunk"] == 1
    assert given(composed().algorithm)["task_chunk"] is None


def test_algorithms_with_a_head_have_neither_inner_rule_nor_steps(composed):
    config = composed("experiment=omniglot_20way1shot", "algorithm=protonet", "device=cpu")
    assert (config.algorithm.inner, config.algorithm.steps, config.evaluate.steps) == (None, None, None)
    assert isinstance(build_parts(config).model.head, torch.nn.Identity)


@pytest.mark.slow
def test_what_is_left_of_a_run_of_an_algorithm_with_a_head(run, tmp_path):
    run(tmp_path, "algorithm=protonet", *TINY, plots=True)
    metrics = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert set(metrics) == {"test/query_loss", "test/accuracy(%)"}
    assert [file.name for file in (tmp_path / "plots").iterdir()] == ["learning_curve.png"]
