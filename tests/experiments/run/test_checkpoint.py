from __future__ import annotations

import pytest
import torch

from experiments.run import checkpoint
from experiments.run.build import build_parts
from experiments.run.config import plain


@pytest.fixture
def saved(composed, tmp_path):
    """Return the path of a checkpoint of the default run, and the parts in it."""
    config = composed("device=cpu")
    parts = build_parts(config)
    path = tmp_path / "run" / checkpoint.FILE
    checkpoint.save(path, parts, step=7, config=plain(config))
    return path, parts


def restore(path, config):
    parts = build_parts(config)
    return checkpoint.restore(checkpoint.load(path), parts, plain(config)), parts


def test_a_state_comes_back_whole(composed, saved):
    path, parts = saved
    drawn = torch.rand(3, generator=parts.generator)
    torch_drawn = torch.rand(3)
    step, restored = restore(path, composed("device=cpu"))
    assert step == 7
    assert torch.equal(torch.rand(3, generator=restored.generator), drawn)
    assert torch.equal(torch.rand(3), torch_drawn)
    for name, value in parts.module.state_dict().items():
        assert torch.equal(restored.module.state_dict()[name], value)


def test_a_failing_save_leaves_the_old_checkpoint(saved, monkeypatch):
    path, parts = saved
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, parts, step=8, config={})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.order=1", r"another configuration: algorithm\.order is 2 there and 1 here"),
        ("seed=5", "another configuration: seed is 0 there and 5 here"),
        ("schedule=cosine", r"schedule\.T_max is absent there and 10000 here"),
    ],
)
def test_another_configuration_is_refused_by_name(composed, saved, override, message):
    with pytest.raises(ValueError, match=message):
        restore(saved[0], composed("device=cpu", override))


@pytest.mark.parametrize(
    "override", ["iterations=20000", "logger=none", "evaluate.every=7", "memory.enabled=false"]
)
def test_what_does_not_touch_the_trajectory_may_change(composed, saved, override):
    assert restore(saved[0], composed("device=cpu", override))[0] == 7


def test_fewer_iterations_than_are_done_are_refused(composed, saved):
    with pytest.raises(ValueError, match="is at step 7 already, so iterations must be at least that, got 5"):
        restore(saved[0], composed("device=cpu", "iterations=5"))


@pytest.mark.parametrize("content", [b"not a checkpoint at all"])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.pt is not a readable checkpoint"):
        checkpoint.load(tmp_path / "x.pt")


def test_a_torch_file_of_something_else_is_refused(tmp_path):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt is a torch file, but not a checkpoint of this program"):
        checkpoint.load(tmp_path / "x.pt")
