from __future__ import annotations

import pytest
import torch
from torch import nn

from metagrad.autograd.recompute.surroundings import Reached, Surroundings


def test_modules_flags_and_autocast_are_what_they_were():
    norm = nn.BatchNorm1d(2)
    then = Surroundings("call", "function", [norm])
    norm.eval()
    norm.eps, norm.running_mean = 0.5, torch.ones(2)
    with torch.autocast("cpu"), then.restored():
        assert norm.training
        assert norm.eps == 1e-5
        assert norm.running_mean is not None
        assert not norm.running_mean.any()
        assert not torch.is_autocast_enabled("cpu")
    assert not norm.training
    assert norm.eps == 0.5
    assert norm.running_mean.all()


def test_what_is_written_into_is_refused_but_not_what_the_function_writes():
    norm = nn.BatchNorm1d(2)
    then = Surroundings("call", "function", [norm])
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    then.forget_written()
    with then.restored():
        pass
    assert norm.running_var is not None
    norm.running_var.mul_(2)
    with (
        pytest.raises(
            RuntimeError, match=r"^call: a tensor of shape \(2,\) that the function reads was modified"
        ),
        then.restored(),
    ):
        pass


def test_a_buffer_that_the_function_binds_anew_is_the_one_from_before():
    norm = nn.BatchNorm1d(2)
    then, before = Surroundings("call", "function", [norm]), norm.running_mean
    norm.running_mean = after = torch.ones(2)
    norm.register_forward_hook(lambda module, args, output: output)
    then.forget_written()
    norm._forward_hooks.clear()
    with then.restored():
        assert norm.running_mean is before
        assert len(norm._forward_hooks) == 1
    assert norm.running_mean is after
    assert not norm._forward_hooks


def test_what_a_function_reaches_is_found_once():
    reached, owner, layer = Reached(), nn.Identity(), nn.Sequential(nn.Linear(1, 1))
    assert reached.read(owner) is None
    assert reached.modules(owner, lambda: layer) == [layer, layer[0]]
    assert reached.modules(owner, lambda: None) == [layer, layer[0]]
    reached.note(owner, lambda: None, [torch.ones(1)])
    assert reached.modules(owner, lambda: layer) == []
    assert reached.read(owner) == [torch.ones(1)]
