"""Configs of studies, and characters that need no files."""

import pytest
import torch
from hydra import compose, initialize_config_dir

from experiments.run.help import CONF
from metagrad import tasks


@pytest.fixture(scope="session")
def configured():
    """Return a function from a study and overrides to its typed config."""

    def call(study, *overrides):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return study.typed(compose(study.name, ["logger=none", "threads=1", *overrides]))

    return call


@pytest.fixture
def strokes(monkeypatch):
    """Replace Omniglot by ten characters, each with one bright stroke."""

    class Drawn:
        def __init__(self, *_, size=28, **__):
            images = 60 * torch.rand(10, 20, 28, 28)
            for i in range(10):
                images[i, :, 2 * i + 4 : 2 * i + 6, 6:22] = 255
            images = torch.nn.functional.interpolate(images, size=(size, size), mode="area")
            self.num_classes, self.images = 10, images.to(torch.uint8)

    monkeypatch.setattr(tasks, "Omniglot", Drawn)
