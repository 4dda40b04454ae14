from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from metagrad.tasks import Batch, Examples


def _textbook(
    model, loss_fn, batch, *, lr, steps, order=2, names=None, start=None, truncate=None, weights=None
):
    """Return the loss of each task, by a plain loop as in tutorials.

    The parameters in ``names`` are adapted, or all parameters. They start from the values of ``start(model, x, y)``.
    ``lr`` is a float, or a tensor with one rate for each step. Steps before the last ``truncate`` are constants.
    ``weights`` are the weights of the query losses after each step.
    """
    losses = []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        fast = {
            k: p for k, p in model.named_parameters() if p.requires_grad and (names is None or k in names)
        }
        if start is not None:
            # Separate variables, so that inner gradients stop at the initial values.
            fast = {k: p.clone().requires_grad_() for k, p in {**fast, **start(model, x, y)}.items()}
        total = 0.0
        for t in range(steps):
            is_kept = truncate is None or t >= steps - truncate
            loss = loss_fn(functional_call(model, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=order == 2 and is_kept)
            rate = lr[t] if isinstance(lr, torch.Tensor) and lr.ndim else lr
            moves = [rate * g if is_kept else (rate * g).detach() for g in grads]
            fast = {k: p - move for (k, p), move in zip(fast.items(), moves, strict=True)}
            if weights is not None:
                total = total + weights[t] * loss_fn(functional_call(model, fast, (query_x,)), query_y)
        losses.append(
            loss_fn(functional_call(model, fast, (query_x,)), query_y) if weights is None else total
        )
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
