"""Learned rules beside those of learn2learn (Arnold et al. 2020), where it is installed: the same meta-gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, Examples

STEPS, LR = 2, 0.1


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def tasks():
    generator = torch.Generator().manual_seed(1)

    def examples(count):
        images = torch.randn(2, 3 * count, 1, 5, 5, dtype=torch.float64, generator=generator)
        return Examples(images, torch.arange(3).repeat_interleave(count).repeat(2, 1))

    return Batch(examples(1), examples(2))


def learned(algorithm):
    return [p for name, p in algorithm.named_parameters() if name.startswith("inner")]


def rates(l2l):
    """Meta-SGD."""
    learner = l2l.algorithms.MetaSGD(network(), lr=LR).double()
    ours = mg.MetaSGD(network(), F.cross_entropy, lr=LR, steps=STEPS)
    return learner, ours, [(a, b, False) for a, b in zip(learner.lrs, learned(ours), strict=True)]


def matrices(l2l):
    """Meta-Curvature, whose matrix of the inputs learn2learn multiplies from the right."""
    learner = l2l.algorithms.GBML(network(), transform=l2l.optim.MetaCurvatureTransform, lr=LR).double()
    ours = mg.MetaCurvature(network(), F.cross_entropy, inner=mg.optim.rules.sgd(lr=LR), steps=STEPS)
    names = {1: ["mc"], 2: ["mc_in", "mc_out"], 4: ["mc_in", "mc_out", "mc_f"]}
    theirs = [
        (getattr(transform, name), name == "mc_out")
        for transform in learner.compute_update.transforms_modules
        for name in names[transform.dim]
    ]
    return learner, ours, [(a, b, flip) for (a, flip), b in zip(theirs, learned(ours), strict=True)]


def factors(l2l):
    """Meta-KFO, which has no matrix of the outputs of a convolution there; biases stay where they start."""
    transform = l2l.optim.KroneckerTransform(l2l.nn.KroneckerLinear)
    learner = l2l.algorithms.GBML(network(), transform=transform, lr=LR).double()
    ours = mg.MetaCurvature(
        network(), F.cross_entropy, inner=mg.optim.rules.sgd(lr=LR), steps=STEPS, psd=True
    )
    own, pairs = iter(learned(ours)), []
    for module, p in zip(learner.compute_update.transforms_modules, learner.module.parameters(), strict=True):
        axes = [next(own) for _ in range({1: 1, 2: 2, 4: 3}[p.ndim])]
        if p.ndim > 1:
            pairs += zip(
                (module.transform.left, module.transform.right), axes[-2:], (False, False), strict=True
            )
    return learner, ours, pairs


def loop(learner, batch):
    """Adapt as learn2learn's users write it."""
    losses = []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        fast = learner.clone()
        for _ in range(STEPS):
            fast.adapt(F.cross_entropy(fast(x), y))
        losses.append(F.cross_entropy(fast(query_x), query_y))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("made", [rates, matrices, factors])
def test_meta_gradients_are_those_of_learn2learn(made):
    learner, algorithm, pairs = made(pytest.importorskip("learn2learn"))
    generator = torch.Generator().manual_seed(2)
    for theirs, ours, is_transposed in pairs:
        with torch.no_grad():
            ours.add_(torch.randn(ours.shape, generator=generator, dtype=ours.dtype), alpha=0.05)
            theirs.copy_(ours.t() if is_transposed else ours)
    variables = [*learner.module.parameters(), *(theirs for theirs, _, _ in pairs)]
    expected = list(torch.autograd.grad(loop(learner, tasks()), variables))
    for number, (_, _, is_transposed) in enumerate(pairs, start=len(expected) - len(pairs)):
        expected[number] = expected[number].t() if is_transposed else expected[number]
    own = [*algorithm.model.parameters(), *(ours for _, ours, _ in pairs)]
    found = torch.autograd.grad(algorithm(tasks()).loss, own)
    torch.testing.assert_close(list(found), expected, rtol=1e-9, atol=1e-12)
