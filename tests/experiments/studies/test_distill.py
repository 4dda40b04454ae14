"""Dataset distillation: the meta-gradient against a naive loop, images that are learned, and resumed runs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from experiments.studies.characters import Examples
from experiments.studies.distill import Distillation, accuracy, coreset, train


def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def drawings(count, seed=0):
    """Return images of two pixels by two, bright on the left or on the right."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 2
    x = torch.rand(count, 1, 2, 2, generator=generator, dtype=torch.float64)
    return Examples(x + F.one_hot(y, 2)[:, None, None], y)


def distillation(**options):
    start = Examples(torch.rand(4, 1, 2, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 1]))
    return Distillation(make, start, **{"steps": 9, "lr": 0.1, "memory": "full", **options})


def test_the_meta_gradient_is_that_of_a_naive_loop():
    task, batch = distillation(memory="sqrt"), drawings(20)
    params = task.fresh()
    found = task.meta_gradient(params, batch)
    images, log_lr = (task.hyper[name].clone().requires_grad_() for name in ("images", "log_lr"))
    w1, b1, w2, b2 = (p.clone().requires_grad_() for p in params.values())

    def loss(x, y, w1, b1, w2, b2):
        return F.cross_entropy(torch.tanh(x.flatten(1) @ w1.T + b1) @ w2.T + b2, y)

    weights, velocities = (w1, b1, w2, b2), (0.0,) * 4
    for _ in range(9):
        slopes = torch.autograd.grad(loss(images, task.labels, *weights), weights, create_graph=True)
        velocities = tuple(0.9 * v + g for v, g in zip(velocities, slopes, strict=True))
        weights = tuple(w - log_lr.exp() * v for w, v in zip(weights, velocities, strict=True))
    expected = torch.autograd.grad(loss(*batch, *weights), (images, log_lr))
    torch.testing.assert_close((found["images"], found["log_lr"]), expected, rtol=1e-9, atol=1e-12)


def test_networks_learn_more_from_learned_images_than_from_those_they_began_as():
    torch.manual_seed(0)
    task, real, seen = distillation(lr=0.3), drawings(64), []
    images, lr = task.learn(real, steps=25, lr=0.1, batch=32, watch=lambda step, images, lr: seen.append(lr))
    assert len(seen) == 25
    assert seen[0] == pytest.approx(0.3)
    assert seen[-1] != 0.3
    fresh = partial(train, lr=lr, steps=9)

    def loss(examples):
        models = [fresh(make(), examples) for _ in range(3)]
        return sum(F.cross_entropy(model(drawings(64, 1).x), real.y).item() for model in models)

    assert loss(images) < 0.8 * loss(Examples(task.hyper["images"], task.labels))


@pytest.mark.parametrize("name", ["random", "herding"])
def test_a_coreset_has_as_many_different_examples_of_each_class(name):
    real = drawings(20)
    found = coreset(name, real, real.x.flatten(1), 4)
    assert found.y.tolist() == [0] * 4 + [1] * 4
    places = [int((real.x == image).flatten(1).all(1).nonzero()) for image in found.x]
    assert len(set(places)) == 8
    assert torch.equal(real.y[places], found.y)


def test_a_network_that_diverged_is_never_right():
    model = nn.Linear(1, 2)
    nn.init.constant_(model.weight, torch.nan)
    assert accuracy(model, Examples(torch.ones(2, 1), torch.tensor([0, 1]))) == 0
