"""The inner loop as the users of higher and of TorchOpt write it."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.bench.workloads import Workload


def higher_loop(work: Workload) -> Tensor:
    """Loop over tasks by higher's inner-loop context (Grefenstette et al. 2019)."""
    import higher  # type: ignore[reportMissingImports]

    losses = []
    inner = torch.optim.SGD(work.model.parameters(), lr=work.lr)
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        with higher.innerloop_ctx(work.model, inner, copy_initial_weights=False) as (fast, optimizer):
            for _ in range(work.steps):
                optimizer.step(work.loss_fn(fast(x), y))
            losses.append(work.loss_fn(fast(query_x), query_y))
    return torch.stack(losses).mean()


def torchopt_loop(work: Workload) -> Tensor:
    """Loop over tasks by TorchOpt's differentiable optimizer (Ren et al. 2023), taken back after each task."""
    import torchopt  # type: ignore[reportMissingImports]

    losses = []
    inner = torchopt.MetaSGD(work.model, lr=work.lr)
    start = [torchopt.extract_state_dict(part, by="reference") for part in (work.model, inner)]
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        for _ in range(work.steps):
            inner.step(work.loss_fn(work.model(x), y))
        losses.append(work.loss_fn(work.model(query_x), query_y))
        for part, state in zip((work.model, inner), start, strict=True):
            torchopt.recover_state_dict(part, state)
    return torch.stack(losses).mean()
