"""The optimizers that are timed, ours and those of pytorch_optimizer, and what they train."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmarks.maml.models import Transformer
from metagrad.models import Conv4
from metagrad.optim import KFAC, SOAP, AdaHessian, Lion, Muon, NewtonCG, Shampoo, SophiaG, SophiaH

RIVAL = "pytorch_optimizer"
LR = 1e-5  # small: what is timed is to stay finite

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Work:
    """A classifier and a batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean cross-entropy of a copy of the model."""
        return F.cross_entropy(model(self.x), self.y)


def mlp(batch: int) -> Work:
    """784-512-512-10 with tanh, 670k parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    return Work(model, torch.randn(batch, 784), torch.randint(10, (batch,)))


def cnn(batch: int) -> Work:
    """Conv4 of 32 filters with batch normalisation."""
    torch.manual_seed(0)
    return Work(Conv4(10, hidden=32), torch.rand(batch, 1, 28, 28), torch.randint(10, (batch,)))


def transformer(batch: int) -> Work:
    """Two pre-norm blocks of width 128 on sequences of 32."""
    torch.manual_seed(0)
    return Work(Transformer(2), torch.randn(batch, 32, 128), torch.randint(10, (batch,)))


WORKLOADS: dict[str, Callable[[], Work]] = {
    f"{make.__name__}-{batch}": functools.partial(make, batch)
    for make in (mlp, cnn, transformer)
    for batch in (128, 512)
}


@dataclass(frozen=True)
class Method:
    """How an optimizer is made and used.

    Attributes:
        make: Of a model; several, where one does not take all parameters.
        period: Steps after which they repeat.
        wants_graph: Whether the first gradient of a period must come with its graph.
    """

    make: Callable[[nn.Module], Optimizers]
    period: int = 1
    wants_graph: bool = False

    def stepper(self, work: Work, model: nn.Module) -> Callable[[], object]:
        """Return what takes a step."""
        first, *others = self.make(model)
        count = 0

        def closure() -> Tensor:
            model.zero_grad()
            loss = work.loss(model)
            loss.backward(create_graph=self.wants_graph and count % self.period == 0)
            return loss

        def step() -> object:
            nonlocal count
            loss = first.step(closure)  # type: ignore[reportCallIssue, reportArgumentType]
            for other in others:
                other.step()
            count += 1
            return loss

        return step


def of_all(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Optimizers]:
    """Give all parameters to one optimizer."""
    return lambda model: [make(model.parameters(), lr=LR, **options)]


def of_matrices(make: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], Optimizers]:
    """Give matrices to one optimizer, and what is left to plain gradient descent."""

    def both(model: nn.Module) -> Optimizers:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return [make(matrices, lr=LR), torch.optim.SGD(others, lr=LR)]

    return both


def rival(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes an optimizer of pytorch_optimizer."""
    return lambda *args, **options: getattr(importlib.import_module(RIVAL), name)(*args, **options)


def rival_muon(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Make pytorch_optimizer's Muon, whose groups say that they are for it."""
    return rival("Muon")([{"params": list(params), "use_muon": True}], lr=lr)


METHODS: dict[str, Method] = {
    "torch.SGD": Method(of_all(torch.optim.SGD)),
    "torch.Adam": Method(of_all(torch.optim.Adam)),
    "AdaHessian": Method(of_all(AdaHessian)),
    "SophiaH-10": Method(of_all(SophiaH), period=10),
    "SophiaG-10": Method(of_all(SophiaG), period=10),
    "KFAC-10": Method(lambda model: [KFAC(model, lr=LR)], period=10),
    "Shampoo-10": Method(of_all(Shampoo, root_every=10), period=10),
    "SOAP-10": Method(of_all(SOAP), period=10),
    "Muon": Method(of_matrices(Muon)),
    "Lion": Method(of_all(Lion)),
    # Damped, lest negative curvature ends the solver at once, as it does in the CNN all the same.
    "NewtonCG-10": Method(of_all(NewtonCG, max_steps=10, progress=None, damping=1.0)),
    f"{RIVAL}.AdaHessian": Method(of_all(rival("AdaHessian")), wants_graph=True),
    f"{RIVAL}.SophiaH-10": Method(of_all(rival("SophiaH")), period=10, wants_graph=True),
    f"{RIVAL}.Shampoo-10": Method(of_all(rival("Shampoo"), preconditioning_compute_steps=10), period=10),
    f"{RIVAL}.SOAP-10": Method(of_all(rival("SOAP")), period=10),
    f"{RIVAL}.Muon": Method(of_matrices(rival_muon)),
    f"{RIVAL}.Lion": Method(of_all(rival("Lion"))),
}
"""Those that are timed by default."""
