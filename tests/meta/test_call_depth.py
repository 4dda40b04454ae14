"""How many of the library's own functions stand between a meta-gradient and the model's first matrix product."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from tests.frames import LIBRARY, frames_of

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
    frames = frames_of(
        lambda: maml(batch), lambda frame, event, function: event == "c_call" and function in PRODUCTS
    )
    shown = "\n".join(f"{file.removeprefix(LIBRARY)} {name}" for file, name in frames)
    assert 0 < len(frames) <= MOST_FRAMES[memory], shown
    assert memory != "full" or len({file for file, _ in frames}) <= MOST_FILES, shown
