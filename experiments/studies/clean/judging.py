"""What weights are worth: how they rank wrong labels, and what a network learns from what they leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import metagrad as mg
from experiments.studies.characters import Examples
from experiments.studies.clean.cleaning import Params, accuracy, losses, zeros
from experiments.studies.clean.drawings import Data


def trained(
    data: Data, examples: Examples, weights: Tensor, penalty: float, start: Params | None = None
) -> Params:
    """Train to the minimum of the weighted loss."""
    params = {name: p.clone().requires_grad_() for name, p in (start or zeros(data)).items()}
    optimizer = mg.optim.LBFGS(params.values(), max_iter=100, tolerance_grad=1e-6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (weights * losses(examples, params)).mean() + penalty / 2 * params["weight"].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return {name: p.detach() for name, p in params.items()}


def judged(data: Data, weights: Tensor, penalties: list[float]) -> dict[str, Any]:
    """Train on weighted examples, with the penalty that validation examples choose, and then on those as well."""
    found: dict[float, Params] = {}
    for penalty in sorted(penalties, reverse=True):
        start = list(found.values())[-1] if found else None
        found[penalty] = trained(data, data.train, weights, penalty, start)
    best = max(found, key=lambda penalty: accuracy(data.validation, found[penalty]))
    everything = torch.cat([weights, torch.ones_like(data.validation.x[:, 0])])
    both = trained(data, data.train.and_also(data.validation), everything, best, found[best])
    return {
        "accuracy": accuracy(data.test, found[best]),
        "with_validation": accuracy(data.test, both),
        "penalty": best,
    }


def validation_alone(data: Data, penalties: list[float]) -> Params:
    """Train on validation examples, with the penalty that training examples choose, wrong ones among them."""
    ones = torch.ones_like(data.validation.x[:, 0])
    found = [trained(data, data.validation, ones, penalty) for penalty in penalties]
    return max(found, key=lambda params: accuracy(data.train, params))


def detection(weights: Tensor, wrong: Tensor) -> dict[str, float]:
    """Say how well small weights find wrong labels.

    Returns:
        `auc`, the probability that a wrong one has a smaller weight than a right one; and of as many of the smallest
        as there are wrong ones, the part that is wrong, `precision`, in percent.
    """
    below = (weights[wrong][:, None] < weights[~wrong]).double()
    alike = (weights[wrong][:, None] == weights[~wrong]).double()
    lowest = weights.argsort()[: int(wrong.sum())]
    return {
        "auc": (below + alike / 2).mean().item(),
        "precision": 100 * wrong[lowest].double().mean().item(),
    }
