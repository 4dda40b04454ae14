"""A process that only saves. It imports little, so that many can be started and killed in sequence."""

from types import SimpleNamespace

import torch

from experiments.run import checkpoint


def save_for_ever(path, last):
    linear = torch.nn.Linear(
        300, 300
    )  # as the optimizer as well, since the first use of a real one imports the compiler
    parts = SimpleNamespace(module=linear, optimizer=linear, schedule=linear, generator=torch.Generator())
    for step in range(10**6):
        torch.nn.init.constant_(linear.weight, step)
        checkpoint.save(path, parts, step=step, config={"values": list(range(1000))})
        last.value = step
