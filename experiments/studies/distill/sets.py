"""The sets of images, each a cell: it is chosen or learned, and judged by the networks that are trained on it."""

from __future__ import annotations

import io
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from experiments.run.files import write_bytes
from experiments.studies.characters import Examples
from experiments.studies.distill.coresets import coreset
from experiments.studies.distill.data import Alphabets, load
from experiments.studies.distill.learning import Distillation
from experiments.studies.distill.networks import NETWORKS, accuracy, train, train_on_all
from experiments.studies.study import Result, Work

if TYPE_CHECKING:
    from experiments.studies.distill.schema import DistillConfig

IMAGES = "images.pt"


def everything(config: DistillConfig, work: Work) -> Result:
    """Train networks on all drawings."""
    data = load(config.classes, *config.drawers)
    networks = {}
    for name in config.judge.networks:
        models = [NETWORKS[name](config.classes) for _ in range(config.judge.trials)]
        trained = [train_on_all(model, data.train, config.judge.epochs) for model in models]
        networks[name] = {"accuracies": [accuracy(model, data.test) for model in trained]}
    return {"size": len(data.train.x), "networks": networks}


def chosen(config: DistillConfig, name: str, work: Work) -> Result:
    """Choose real drawings, by the features of a network that is trained on all, and judge them."""
    data = load(config.classes, *config.drawers)
    model = train_on_all(_own(config)(), data.train, config.judge.epochs)
    with torch.no_grad():
        features = model[:-1](data.train.x)  # type: ignore[reportIndexIssue]
    return _kept_and_judged(config, coreset(name, data.train, features, config.per_class), data, work)


def learned(config: DistillConfig, steps: int, work: Work) -> Result:
    """Learn images, from real ones on, through so many steps, and judge them."""
    data, options = load(config.classes, *config.drawers), config.learn
    start = coreset("random", data.train, data.train.x.flatten(1), config.per_class)
    task = Distillation(
        _own(config),
        start,
        steps=steps,
        momentum=config.momentum,
        lr=options.inner_time / steps,
        memory=options.memory,
    )

    def watch(step: int, images: Examples, lr: float) -> None:
        if step % options.watch_every == 0:
            model = train(_own(config)(), images, lr=lr, momentum=config.momentum, steps=steps)
            work.log(step, {"accuracy/validation(%)": accuracy(model, data.val), "lr": lr})

    began = time.process_time()
    images, lr = task.learn(data.train, steps=options.steps, lr=options.lr, batch=options.batch, watch=watch)
    seconds = time.process_time() - began
    found = _kept_and_judged(config, images, data, work, own=(lr, steps))
    return {"steps": steps, "lr": lr, "seconds": seconds, **found}


def _own(config: DistillConfig) -> partial:
    return partial(NETWORKS[config.judge.networks[0]], config.classes)


def _kept_and_judged(
    config: DistillConfig,
    images: Examples,
    data: Alphabets,
    work: Work,
    own: tuple[float, int] | None = None,
) -> Result:
    """Write the images into the folder of the cell, and test every network on them."""
    content = io.BytesIO()
    torch.save(tuple(images), content)
    write_bytes(work.folder / IMAGES, content.getvalue())
    networks = {name: judged(config, name, images, data, own) for name in config.judge.networks}
    return {"size": len(images.x), "networks": networks}


def judged(
    config: DistillConfig, network: str, images: Examples, data: Alphabets, own: tuple[float, int] | None
) -> Result:
    """Choose a rate by the validation drawings, then test fresh networks.

    Args:
        config: Which rates, how many steps and networks.
        network: Which.
        images: What they are trained on.
        data: What they are tested on.
        own: A rate and a number of steps to be tried as well.
    """
    options = config.judge

    def trained(lr: float, steps: int) -> torch.nn.Module:
        model = NETWORKS[network](config.classes)
        return train(model, images, lr=lr, momentum=config.momentum, steps=steps)

    recipes = [(lr, options.steps) for lr in options.rates] + ([] if own is None else [own])
    best = max(recipes, key=lambda recipe: accuracy(trained(*recipe), data.val))
    accuracies = [accuracy(trained(*best), data.test) for _ in range(options.trials)]
    return {"lr": best[0], "steps": best[1], "accuracies": accuracies}
