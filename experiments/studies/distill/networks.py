"""The networks, how one is trained on a set of images, and how often it is right."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from experiments.studies.characters import Examples

PIXELS, BATCH, RATE = 784, 128, 2e-3


def mlp(hidden: int) -> Callable[[int], nn.Module]:
    """Return what makes a network of one hidden layer."""
    return lambda classes: nn.Sequential(nn.Flatten(), *mg.models.MLP([PIXELS, hidden, classes]))


def convnet(classes: int) -> nn.Module:
    """Make a network of two convolutions with strides."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 49, classes),
    )


NETWORKS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp(64), "wide": mlp(256), "convnet": convnet}


def train(model: nn.Module, examples: Examples, *, lr: float, momentum: float, steps: int) -> nn.Module:
    """Train by gradient descent on all examples at once, as images are learned through it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(examples.x), examples.y).backward()
        optimizer.step()
    return model


def train_on_all(model: nn.Module, examples: Examples, epochs: int) -> nn.Module:
    """Train by Adam on batches."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples.x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(examples.x[chosen]), examples.y[chosen]).backward()
            optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """Return the share of examples that are classified right, in percent; zero if outputs are not finite."""
    logits = model(examples.x)
    return 100 * ((logits.argmax(1) == examples.y) & logits.isfinite().all(1)).double().mean().item()
