"""Learning to reweight: the weights of a batch are what one step on it would gain, and are not kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import metagrad as mg
from experiments.run.allocations import peak_bytes
from experiments.studies.characters import Examples
from experiments.studies.clean.cleaning import Found, Params, Watch, losses, zeros
from experiments.studies.clean.drawings import Data
from experiments.studies.clean.schema import CleanConfig
from metagrad.hypergrad import Unroll


def reweight(data: Data, config: CleanConfig, watch: Watch) -> Found:
    r"""Train on batches whose weights are what a step would gain on the validation examples.

    .. math:: w_i = \frac{[-\partial_{\epsilon_i} L_{\text{val}}(\theta - \alpha \nabla_\theta \sum_i
              \epsilon_i \ell_i)]_+}{\sum_j [\cdot]_+} \quad\text{at } \epsilon = 0

    Ren, Zeng, Yang, Urtasun, "Learning to reweight examples for robust deep learning", ICML 2018, algorithm 1. The
    weights that are returned are means over the steps, relative to the largest of a batch.
    """
    rule, params = mg.optim.rules.sgd(lr=config.reweight.lr), dict(zeros(data))
    state, sums, counts = (
        rule.init(params),
        torch.zeros_like(data.train.x[:, 0]),
        torch.zeros_like(data.train.y),
    )
    for step in range(config.reweight.steps):
        watch(step, params)
        chosen = torch.randperm(len(counts))[: config.reweight.batch]
        batch = data.train.at(chosen)
        weights = batch_weights(batch, data.validation, params, rule)
        counts[chosen] += 1
        sums[chosen] += weights / weights.max().clamp_min(torch.finfo(weights.dtype).tiny)
        leaves = {name: p.requires_grad_() for name, p in params.items()}
        loss = (weights * losses(batch, leaves)).sum() + config.loop.penalty / 2 * leaves[
            "weight"
        ].square().sum()
        moved, state = rule.update(mg.grad(loss, leaves), state, params)
        params = {name: p.detach() for name, p in moved.items()}
    watch(config.reweight.steps, params)
    peak = peak_bytes(partial(batch_weights, batch, data.validation, params, rule))
    return Found(sums / counts.clamp_min(1), params, peak)


def batch_weights(batch: Examples, validation: Examples, params: Params, rule: Any) -> Tensor:
    """Return the weights of a batch, which sum to one if any is above zero."""
    gradient = mg.hypergradient(
        lambda params, hyper: losses(validation, params).mean(),
        lambda params, hyper: (hyper["weights"] * losses(batch, params)).sum(),
        params,
        {"weights": torch.zeros_like(batch.x[:, 0])},
        method=Unroll(rule, steps=1),
    )["weights"]
    gains = (-gradient).clamp_min(0)
    return gains / gains.sum().clamp_min(torch.finfo(gains.dtype).tiny)
