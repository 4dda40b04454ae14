r"""Weights of training examples, learned by the loss of a network on examples that are known to be right.

.. math:: \min_w \; L_{\text{val}}(\theta^*(w)), \qquad
          \theta^*(w) = \arg\min_\theta \frac{1}{n} \sum_i \sigma(w_i) \, \ell_i(\theta) + \frac{\rho}{2} |\theta|^2

Data hyper-cleaning (Franceschi, Donini, Frasconi, Pontil, "Forward and reverse gradient-based hyperparameter
optimization", ICML 2017, section 5.1). The network is linear in its features, so that the inner level is convex.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import metagrad as mg
from experiments.run.allocations import peak_bytes
from experiments.studies.characters import Examples
from experiments.studies.clean.drawings import Data
from experiments.studies.clean.schema import CleanConfig, LoopConfig
from metagrad.hypergrad import CG, FiniteDifference, FirstOrder, Method, Neumann, Nystrom, Unroll

Params = Mapping[str, Any]
"""Of a network, strided tensors by name."""
Loss = Callable[[Params, Any], Tensor]


class Found(NamedTuple):
    """What a way of learning weights ends with.

    Attributes:
        weights: Of the training examples, `[n]`, between 0 and 1.
        params: Of the network, where the loop ended.
        peak: The most bytes of an outer step.
    """

    weights: Tensor
    params: Params
    peak: int


def losses(examples: Examples, params: Params) -> Tensor:
    """Return the cross-entropy of each example, `[n]`."""
    return F.cross_entropy(examples.x @ params["weight"], examples.y, reduction="none")


def accuracy(examples: Examples, params: Params) -> float:
    """Return the part of the examples that are classified as they should be, in percent."""
    return 100 * (examples.x @ params["weight"]).argmax(1).eq(examples.y).float().mean().item()


def zeros(data: Data) -> Params:
    """Return the parameters that every training begins with."""
    return {"weight": torch.zeros(data.train.x.shape[1], data.classes, dtype=data.train.x.dtype)}


def weighted(data: Data, penalty: float) -> Loss:
    """Return the inner loss of the logits of weights, `hyper["logits"]`."""

    def loss(params: Params, hyper: Mapping[str, Tensor]) -> Tensor:
        terms = hyper["logits"].sigmoid() * losses(data.train, params)
        return terms.mean() + penalty / 2 * params["weight"].square().sum()

    return loss


def robust(data: Data, penalty: float) -> Loss:
    r"""Return the inner loss of a learned exponent q: :math:`(1 - p^q) / q` of the probability p of a label.

    From the cross-entropy (0) to the absolute error (1): Zhang and Sabuncu, "Generalized cross entropy loss for
    training deep neural networks with noisy labels", NeurIPS 2018, section 3.2.
    """

    def loss(params: Params, hyper: Mapping[str, Tensor]) -> Tensor:
        q = hyper["logits"].sigmoid()
        terms = -torch.expm1(-q * losses(data.train, params)) / q
        return terms.mean() + penalty / 2 * params["weight"].square().sum()

    return loss


def methods(loop: LoopConfig) -> dict[str, Method]:
    """Return the hypergradients, which spend the same number of products or steps, or none."""
    rule = mg.optim.rules.sgd(lr=loop.lr, momentum=loop.momentum)
    return {
        "CG": CG(steps=loop.terms),
        "Neumann": Neumann(steps=loop.terms, scale=loop.lr),
        "Nystrom": Nystrom(rank=loop.terms, damping=loop.damping, generator=torch.Generator().manual_seed(0)),
        "T1-T2": FirstOrder(scale=loop.lr),
        "Unroll": Unroll(rule, steps=loop.terms),
        "FiniteDifference": FiniteDifference(lr=loop.lr),
    }


@dataclass
class Watch:
    """The accuracy on test examples over the seconds of the processor, without those that measuring takes."""

    test: Examples
    every: int
    log: Callable[[int, Mapping[str, float]], None]
    seconds: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    spent: float = 0.0
    since: float = field(default_factory=time.process_time)

    def __call__(self, step: int, params: Params, *_: object) -> None:
        """Measure where it is due."""
        self.spent += time.process_time() - self.since
        if step % self.every == 0:
            self.seconds.append(self.spent)
            self.accuracies.append(accuracy(self.test, params))
            self.log(step, {"accuracy(%)": self.accuracies[-1], "seconds": self.spent})
        self.since = time.process_time()


def cleaned(
    data: Data, config: CleanConfig, method: Method, watch: Watch, *, inner: Loss, logits: Tensor
) -> Any:
    """Learn the logits of an inner loss; return what the loop leaves, and the peak bytes of its last step."""
    loop = config.loop

    def outer(params: Params, hyper: Any) -> Tensor:
        return losses(data.validation, params).mean()

    def run(params: Params, logits: Tensor, steps: int, callback: Any) -> mg.hypergrad.BilevelResult:
        return mg.bilevel(
            outer,
            inner,
            params,
            {"logits": logits},
            inner=mg.optim.rules.sgd(lr=loop.lr, momentum=loop.momentum),
            outer=mg.optim.rules.adam(lr=loop.outer_lr),
            steps=steps,
            inner_steps=loop.inner_steps,
            method=method,
            callback=callback,
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left a residual")  # so many steps are what is compared
        found = run(zeros(data), logits, loop.steps, watch)
        watch(loop.steps, found.params)
        peak = peak_bytes(lambda: run(found.params, found.hyper["logits"], 1, None))
    return found, peak


def learn_weights(data: Data, config: CleanConfig, method: Method, watch: Watch) -> Found:
    """Learn a weight for each training example."""
    inner, logits = weighted(data, config.loop.penalty), torch.zeros_like(data.train.x[:, 0])
    found, peak = cleaned(data, config, method, watch, inner=inner, logits=logits)
    return Found(found.hyper["logits"].sigmoid(), found.params, peak)


def learn_loss(data: Data, config: CleanConfig, method: Method, watch: Watch) -> Found:
    """Learn the exponent of a robust loss; its weights are what the gradient of each example is multiplied with."""
    inner, logits = robust(data, config.loop.penalty), data.train.x.new_zeros(())
    found, peak = cleaned(data, config, method, watch, inner=inner, logits=logits)
    exponent = found.hyper["logits"].sigmoid()
    return Found((-exponent * losses(data.train, found.params)).exp(), found.params, peak)
