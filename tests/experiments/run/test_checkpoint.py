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


def test_no_flipped_byte_loads(saved):
    path, _ = saved
    content = bytearray(path.read_bytes())
    places = torch.randperm(len(content), generator=torch.Generator().manual_seed(0))[:200].tolist()
    for place in [*places, *range(len(content) - 100, len(content))]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"resume: .*last\.pt is (damaged|not a checkpoint)"):
            checkpoint.load(path)
    path.write_bytes(content)
    assert checkpoint.load(path)["step"] == 7
    assert torch.load(path, weights_only=True)["step"] == 7  # as any other torch file


@pytest.mark.parametrize("content", [b"not a checkpoint at all", b""])
def test_a_file_of_another_kind_is_an_error(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.pt is not a checkpoint of version 1; it was cut off"):
        checkpoint.load(tmp_path / "x.pt")
