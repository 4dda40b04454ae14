from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from metagrad.tasks import Batch, Examples


def _textbook(model, loss_fn, batch, *, lr, steps, order=2, names=None):
    """The plain task loop, as every tutorial has it; the parameters of some names adapt, or all."""
    losses = []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        fast = {
            k: p for k, p in model.named_parameters() if p.requires_grad and (names is None or k in names)
        }
        for _ in range(steps):
            loss = loss_fn(functional_call(model, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=order == 2)
            fast = {k: p - lr * g for (k, p), g in zip(fast.items(), grads, strict=True)}
        losses.append(loss_fn(functional_call(model, fast, (query_x,)), query_y))
    return torch.stack(losses)


@pytest.fixture
def textbook():
    return _textbook


@pytest.fixture
def regression():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64)  # noqa: E731
    return Batch(Examples(draw(4, 6, 2), draw(4, 6, 3)), Examples(draw(4, 5, 2), draw(4, 5, 3)))


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64)  # noqa: E731
    labels = torch.arange(3).repeat(2, 2)
    return Batch(Examples(draw(2, 6, 1, 16, 16), labels), Examples(draw(2, 6, 1, 16, 16), labels))
