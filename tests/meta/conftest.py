import pytest
import torch

from metagrad.tasks import Batch, Examples


def _numbers():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def regression():
    draw = _numbers()
    return Batch(Examples(draw(4, 6, 2), draw(4, 6, 3)), Examples(draw(4, 5, 2), draw(4, 5, 3)))


@pytest.fixture
def images():
    draw, labels = _numbers(), torch.arange(3).repeat(2, 2)
    return Batch(Examples(draw(2, 6, 1, 16, 16), labels), Examples(draw(2, 6, 1, 16, 16), labels))
