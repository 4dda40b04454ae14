"""Cleaning of labels: the hypergradient against a naive loop, incorrect labels that are found, and resumed runs."""

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from experiments.studies import clean
from experiments.studies.characters import Examples
from experiments.studies.study import Work

CLASSES = 3


def clouds(number, generator):
    y = torch.arange(number) % CLASSES
    x = torch.randn(number, 6, dtype=torch.float64, generator=generator) + 3 * torch.eye(6)[y]
    return Examples(x - 0.5, y)


@pytest.fixture
def data():
    """Return three clouds of points, with two fifths of the points labeled as another cloud."""
    generator = torch.Generator().manual_seed(0)
    train, validation, test = (clouds(number, generator) for number in (30, 30, 60))
    noisy = clean.mislabel(train, 0.4, CLASSES, generator)
    return clean.Data(noisy, noisy.y != train.y, validation, test, CLASSES)


def outer_of(data):
    return lambda params, hyper: clean.losses(data.validation, params).mean()


def textbook(data, step_loss, hyper, start, *, steps, lr, momentum):
    """Train by a plain loop that is kept, and differentiate the validation loss through it."""
    weight, velocity = start.clone().requires_grad_(), 0.0
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(step_loss(weight), weight, create_graph=True)
        velocity = momentum * velocity + gradient
        weight = weight - lr * velocity
    outer = F.cross_entropy(data.validation.x @ weight, data.validation.y)
    return torch.autograd.grad(outer, hyper)[0]


def test_the_unrolled_hypergradient_is_that_of_a_naive_loop(data):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(6, CLASSES, dtype=torch.float64, generator=generator)
    logits = torch.randn(30, dtype=torch.float64, generator=generator).requires_grad_()

    def step_loss(weight):
        terms = F.cross_entropy(data.train.x @ weight, data.train.y, reduction="none")
        return (logits.sigmoid() * terms).mean() + 0.005 * (weight**2).sum()

    method, inner = clean.hypergradients(4)["Unroll"], clean.weighted(data, 0.01)
    found = mg.hypergradient(outer_of(data), inner, {"weight": start}, {"logits": logits}, method=method)
    expected = textbook(data, step_loss, logits, start, steps=4, lr=1.0, momentum=0.9)
    torch.testing.assert_close(found["logits"], expected, rtol=1e-9, atol=1e-12)


def test_at_the_minimum_conjugate_gradients_have_the_influence_of_each_example(data):
    """Koh and Liang's formula with a dense Hessian."""
    inner, logits = clean.weighted(data, 0.1), torch.zeros(30, dtype=torch.float64)
    weight = torch.zeros(6, CLASSES, dtype=torch.float64)
    for _ in range(60):
        weight = weight - 0.5 * torch.func.grad(lambda w: inner({"weight": w}, {"logits": logits}))(weight)
    found = mg.hypergradient(
        outer_of(data), inner, {"weight": weight}, {"logits": logits}, method=mg.hypergrad.CG(steps=60)
    )["logits"]
    H = torch.func.hessian(lambda w: inner({"weight": w.view(6, -1)}, {"logits": logits}))(weight.flatten())
    slope = torch.func.grad(lambda w: clean.losses(data.validation, {"weight": w}).mean())(weight).flatten()
    own = torch.func.jacrev(lambda w: clean.losses(data.train, {"weight": w}))(weight).flatten(1)
    expected = -0.25 / 30 * own @ torch.linalg.solve(H, slope)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_weights_of_a_batch_are_the_gains_of_one_step(data):
    weight = torch.randn(6, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = clean.batch_weights(data.train, data.validation, {"weight": weight}, mg.optim.rules.sgd(lr=0.5))
    epsilon = torch.zeros(30, dtype=torch.float64, requires_grad=True)

    def step_loss(weight):
        return (epsilon * F.cross_entropy(data.train.x @ weight, data.train.y, reduction="none")).sum()

    gains = -textbook(data, step_loss, epsilon, weight, steps=1, lr=0.5, momentum=0.0)
    torch.testing.assert_close(found, gains.clamp_min(0) / gains.clamp_min(0).sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CG", "reweight"])
def test_wrong_labels_are_found(data, configured, name, tmp_path, monkeypatch):
    """In clouds that do not overlap, incorrect labels have small weights, and training gains from the weights."""
    monkeypatch.setattr(clean, "data_of", lambda config, seed: data)
    monkeypatch.setattr(clean, "LR", 0.3)
    options = ("steps=25", "reweight_steps=40", "batch=15", "reweight_lr=0.3", "penalties=[1e-2]")
    torch.manual_seed(0)  # as a study does
    found = clean.learned(
        Work(tmp_path, 0, lambda step, values: None), configured(clean.study, *options), name
    )
    assert found["auc"] > 0.8
    assert found["precision"] > 50  # by chance 40
    assert found["accuracy"] >= clean.evaluated(data, torch.ones(30, dtype=torch.float64), [1e-2])["accuracy"]


def test_detection_counts_pairs():
    wrong = torch.tensor([True, False, True, False, False])
    found = clean.detection(torch.tensor([0.1, 0.9, 0.5, 0.5, 0.3]), wrong)
    assert found["auc"] == pytest.approx((3 + 1 + 0.5) / 6)
    assert found["precision"] == pytest.approx(50)
    assert clean.detection(torch.ones(5), wrong)["auc"] == 0.5


@pytest.mark.parametrize("is_white", [True, False])
def test_no_hessian_of_scaled_features_is_above_the_identity(is_white):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(40, 4, dtype=torch.float64, generator=generator) @ torch.diag(
        torch.tensor([5.0, 1.0, 0.1, 0.0], dtype=torch.float64)
    )
    x, y = clean.scaled(raw, raw, is_white), torch.arange(40) % 2
    torch.testing.assert_close(x.mean(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    H = torch.func.hessian(lambda w: F.cross_entropy(x @ w.view(4, 2), y))(
        torch.zeros(8, dtype=torch.float64)
    )
    assert torch.linalg.eigvalsh(H).max() == pytest.approx(1.0)  # two classes reach the bound
