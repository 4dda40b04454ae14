"""One cell: a network is trained with a defence, measured, and attacked."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import metagrad as mg
from experiments.run.seconds import cpu_seconds
from experiments.studies.attack_images.attacks import Attack, Box, SignSteps, attacks, cross_entropy
from experiments.studies.attack_images.defences import objective, sign_direction
from experiments.studies.attack_images.problem import characters, is_right, network, shifted
from experiments.studies.characters import Examples

if TYPE_CHECKING:
    from experiments.studies.attack_images.schema import ImagesConfig
    from experiments.studies.study import Result, Work

_TIMINGS = 5
ALL = "all attacks"


def cell(config: ImagesConfig, defence: str, work: Work) -> Result:
    """Train a network, and return what it withstands, in percent of the test images."""
    train, test = characters(config.data, work.seed)
    model = network(config.data.classes, config.training.width, test.x.shape[-1])
    seconds = fit(model, train, config, defence, work)
    model.requires_grad_(False)
    return {
        "clean": percent(is_right(model, test)),
        "seconds_per_step": seconds / config.training.steps,
        **derivatives(model, test),
        "attacks": [attacked(model, test, epsilon, config, work.seed) for epsilon in config.attack.epsilons],
    }


def fit(model: nn.Module, train: Examples, config: ImagesConfig, defence: str, work: Work) -> float:
    """Train with a defence that sets in by and by, and return the seconds of the CPU."""
    settings = config.training
    generator = torch.Generator().manual_seed(work.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=settings.steps)
    start = time.process_time()
    for step in range(settings.steps):
        batch = train.at(torch.randint(len(train.x), (settings.batch,), generator=generator))
        batch = batch._replace(x=shifted(batch.x, settings.shift, generator))
        part = strength(step / settings.steps)
        loss = objective(defence, model, batch, config.defence, part, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            work.log(step, {"train/loss": loss.item()})
    return time.process_time() - start


def strength(part: float) -> float:
    """Return that of a defence after a part of the training: with all of it from the start, little is learned."""
    return min(1.0, max(0.0, (part - 1 / 4) / (2 / 3 - 1 / 4)))


def derivatives(model: nn.Module, test: Examples) -> dict[str, float]:
    """Return slope and curvature of the loss in the image, and what a Hessian product takes in gradients."""

    def losses() -> tuple[Tensor, dict[str, Tensor]]:
        x = test.x.detach().requires_grad_()
        return cross_entropy(model(x), test.y), {"x": x}

    def gradient() -> None:
        values, images = losses()
        mg.grad(values.sum(), images)

    values, images = losses()
    with mg.hessian(values.sum(), images) as H:  # block-diagonal
        slope = H.gradient.view(len(test.x), -1)
        curved = (H @ sign_direction(slope).flatten()).view_as(slope)
        product = cpu_seconds(lambda: H @ curved.flatten(), _TIMINGS)
    return {
        "slope": slope.norm(dim=1).mean().item(),
        "curvature": curved.norm(dim=1).mean().item(),
        "product_in_gradients": product / cpu_seconds(gradient, _TIMINGS),
    }


def attacked(
    model: nn.Module, test: Examples, epsilon: float, config: ImagesConfig, seed: int
) -> dict[str, Any]:
    """Return the accuracy under each attack over its gradients, and under all of them."""
    box, generator = Box.around(test.x, epsilon), torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {"epsilon": epsilon}
    withstands = is_right(model, test)
    for name, attack in attacks(config.attack.cg_steps).items():
        found[name], right = curve(model, test, attack, box, config.attack.gradients, generator)
        withstands = withstands & right
    return {**found, ALL: percent(withstands)}


def curve(
    model: nn.Module,
    test: Examples,
    attack: Attack,
    box: Box,
    budgets: list[int],
    generator: torch.Generator,
) -> tuple[list[list[float]], Tensor]:
    """Return pairs of gradients and accuracy, and which images no iterate turned.

    The size of sign steps is by their number, so that each budget is an attack of its own.
    """
    points, right = [], is_right(model, test)
    has_own_runs = isinstance(attack, SignSteps)
    for budget in budgets if has_own_runs else budgets[-1:]:
        standing, own = is_right(model, test), []
        for x, spent in attack(model, test, box, budget, generator):
            standing = standing & is_right(model, Examples(x, test.y))
            own.append([spent, percent(standing)])
        points += own[-1:] if has_own_runs else own
        right = right & standing
    return points, right


def percent(right: Tensor) -> float:
    """Return the share that is true."""
    return 100 * statistics.mean(right.tolist())
