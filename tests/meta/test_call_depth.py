"""How many of the library's own functions stand between a meta-gradient and the model's first matrix product."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg

LIBRARY = str(Path(mg.__file__).parent)
PRODUCTS = {F.linear, torch.baddbmm, torch.bmm}
MOST_FILES = 6
MOST_FRAMES = {"full": 10, "step": 18}


class Wrapped(nn.Module):
    """A module whose stacked form is not known, so that torch.vmap runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.layer(x)


def frames_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the functions of the library, and their files, on the stack of the first matrix product of a call."""
    found: list[tuple[str, str]] = []

    def profile(frame, event, function):
        if found or event != "c_call" or function not in PRODUCTS:
            return
        while frame is not None:
            if frame.f_code.co_filename.startswith(LIBRARY):
                found.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found[::-1]


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)), Wrapped],
    ids=["layers", "vmap"],
)
def test_a_meta_gradient_reaches_the_model_in_few_frames(make, task_chunk, memory):
    maml = mg.MAML(
        make(), F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, memory=memory, task_chunk=task_chunk
    )
    batch = mg.tasks.Sinusoid(shots=3, queries=3).sample(2)
    maml(batch)  # examines the model
    frames = frames_of(lambda: maml(batch))
    shown = "\n".join(f"{file.removeprefix(LIBRARY)} {name}" for file, name in frames)
    assert 0 < len(frames) <= MOST_FRAMES[memory], shown
    assert memory != "full" or len({file for file, _ in frames}) <= MOST_FILES, shown
