import pytest
import torch

from experiments.run.build import build, build_parts, build_splits, device, generator
from experiments.run.schema import Model, Target


@pytest.mark.parametrize("target", ["os.system", "metagradient.x"])
def test_only_allowed_targets_are_built(target):
    with pytest.raises(ValueError, match=f"_target_={target} is not allowed; it must start with metagrad"):
        build(Target(_target_=target))


def test_a_refused_argument_is_told_in_the_words_of_who_refused_it(composed):
    with pytest.raises(ValueError, match=r"model: metagrad\.models\.MLP: .*sizes: .*two or more"):
        build(composed("model.sizes=[1]").model, key="model")


def test_a_name_that_does_not_exist_is_told():
    with pytest.raises(ValueError, match=r"build: metagrad\.models\.Nothing: "):
        build(Model(_target_="metagrad.models.Nothing"))


def boom():
    raise RuntimeError("boom")


def test_an_error_of_an_argument_names_the_argument():
    parts = {"_target_": "metagrad.optim.rules.chain", "_args_": [{"_target_": f"{__name__}.boom"}]}
    with pytest.raises(ValueError, match=rf"algorithm\.inner\._args_: {__name__}\.boom: boom"):
        build(parts, allow=["tests."], key="algorithm.inner")


HEADS = [
    (["algorithm=anil"], "head", "4"),
    (["algorithm=boil", "algorithm.head=2"], "head", "2"),
    (["algorithm=protonet"], "without", "4"),
]


@pytest.mark.parametrize(("overrides", "key", "value"), HEADS)
def test_the_head_of_a_model_without_one_is_its_last_layer(composed, overrides, key, value):
    config = composed("device=cpu", *overrides)
    build_parts(config)
    assert getattr(config.algorithm, key) == value


def test_parts_are_what_the_config_says(composed):
    parts = build_parts(
        composed("device=cpu", "optimizer=sgd", "schedule=cosine", "iterations=10", "algorithm=fomaml")
    )
    assert isinstance(parts.optimizer, torch.optim.SGD)
    assert isinstance(parts.schedule, torch.optim.lr_scheduler.CosineAnnealingLR)
    assert parts.algorithm.order == 1


def test_streams_of_tasks_differ_and_repeat(composed):
    tasks = build_splits(composed()).train
    drawn = {
        name: tasks.sample(2, generator=generator(0, name)).support.x
        for name in ("train", "validation", "test")
    }
    assert not torch.equal(drawn["train"], drawn["test"])
    assert not torch.equal(drawn["validation"], drawn["test"])
    assert torch.equal(drawn["test"], tasks.sample(2, generator=generator(0, "test")).support.x)
    assert not torch.equal(drawn["test"], tasks.sample(2, generator=generator(1, "test")).support.x)


def test_cuda_is_refused_where_there_is_none(composed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no CUDA device; use device=auto"):
        device(composed("device=cuda"))
    assert device(composed("device=auto")).type == "cpu"
