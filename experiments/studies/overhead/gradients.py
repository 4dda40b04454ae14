"""Ways to the gradient of a loss, and to a second derivative by differentiating that again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.studies.overhead.run import Run, at_once, half_square
from experiments.studies.overhead.work import Work
from metagrad.sparse import RowSparse

PIECES = 4  # mini-batches of an accumulation


def gradient(work: Work) -> Run:
    """The loss and its graph are held; the backward pass frees it."""
    params = list(work.params.values())
    return Run(
        lambda: work.loss_fn(work.model(work.x), work.y), lambda loss: torch.autograd.grad(loss, params)
    )


def second(work: Work) -> Run:
    """The gradient and its graph are held, by create_graph=True; the second backward pass frees it."""
    params = list(work.params.values())

    def hold() -> Sequence[Tensor]:
        loss = work.loss_fn(work.model(work.x), work.y)
        return torch.autograd.grad(loss, params, create_graph=True)

    return Run(hold, lambda grads: torch.autograd.grad(half_square(grads), params))


def pieces(work: Work) -> list[tuple[Tensor, Tensor]]:
    """Cut the batch."""
    return list(zip(work.x.chunk(PIECES), work.y.chunk(PIECES), strict=True))


def accumulated_gradient(work: Work) -> Run:
    """One mini-batch after the other; the sum is written in place, but that of rows of tables."""
    params = list(work.params.values())

    def compute() -> list[Tensor]:
        total: list[Tensor] = []
        for x, y in pieces(work):
            part = torch.autograd.grad(work.loss_fn(work.model(x), y), params)
            share = len(y) / len(work.y)
            total = [
                _added(whole, g, share) for whole, g in zip(total or [None] * len(part), part, strict=True)
            ]
        return total

    return at_once(compute)


def _added(whole: Tensor | None, part: Tensor, share: float) -> Tensor:
    if isinstance(part, RowSparse):
        return share * part if whole is None else whole + share * part
    return part.mul_(share) if whole is None else whole.add_(part, alpha=share)


def compiled_gradient(work: Work) -> Run:
    """The gradient as one compiled function."""
    run = torch.compile(torch.func.grad(work.loss))
    return at_once(lambda: run(_leaves(work), work.x, work.y))


def compiled_second(work: Work) -> Run:
    """Both derivatives as one compiled function."""

    def penalty(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return half_square(list(torch.func.grad(work.loss)(params, x, y).values()))

    run = torch.compile(torch.func.grad(penalty))
    return at_once(lambda: run(_leaves(work), work.x, work.y))


def _leaves(work: Work) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in work.params.items()}
