"""The inner loop as the users of higher, of learn2learn and of TorchOpt write it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.benchmarks.maml.workloads import Workload


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


def learn2learn_loop(work: Workload) -> Tensor:
    """Loop over tasks by learn2learn's clones (Arnold et al. 2020); where a part adapts, of that, behind features."""
    import learn2learn  # type: ignore[reportMissingImports]

    layers = dict(work.model.named_children()) if work.adapt else {}
    maml = learn2learn.algorithms.MAML(layers.pop(work.adapt, work.model), lr=work.lr)
    features = nn.Sequential(*layers.values())
    losses = []
    for x, y, query_x, query_y in zip(*work.batch.support, *work.batch.query, strict=True):
        fast, support = maml.clone(), features(x)
        for _ in range(work.steps):
            fast.adapt(work.loss_fn(fast(support), y))
        losses.append(work.loss_fn(fast(features(query_x)), query_y))
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
