r"""Learn images through training: a network that is trained on them should do well on real drawings.

.. math:: \min_{x, \alpha} \; E_{\theta_0} \, \mathcal{L}(\theta_T(x, \alpha), \mathrm{real}), \qquad
          \theta_{t+1} = \theta_t - \alpha \, v_{t+1}, \quad v_{t+1} = \mu v_t + \nabla \mathcal{L}(\theta_t, x)

The rate is learned with the images, and the initialisation is drawn anew for each outer step. Wang, Zhu, Torralba,
Efros, "Dataset distillation", arXiv:1811.10959, section 3; Maclaurin, Duvenaud, Adams, "Gradient-based
hyperparameter optimization through reversible learning", ICML 2015, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import metagrad as mg
from experiments.run.progress import Progress
from experiments.studies.characters import Examples

Params = dict[str, Tensor]


class Distillation:
    """Images to be learned through the training of a network.

    Args:
        make: Makes a network.
        start: The images to begin with, and their classes.
        steps: Of gradient descent.
        momentum: Its momentum.
        lr: The rate to begin with.
        memory: What the unroll keeps, as of :func:`metagrad.unroll`.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        start: Examples,
        *,
        steps: int,
        momentum: float,
        lr: float,
        memory: str | int,
    ) -> None:
        self.make, self.labels = make, start.y
        self.hyper = {"images": start.x, "log_lr": torch.tensor(math.log(lr), dtype=start.x.dtype)}
        self._network = make()

        def rule(hyper: Any) -> mg.optim.rules.Rule:
            return mg.optim.rules.sgd(lr=hyper["log_lr"].exp(), momentum=momentum)

        self.method = mg.hypergrad.Unroll(rule, steps=steps, memory=memory)

    def fresh(self, step: int = 0) -> Params:
        """Draw the parameters of a network."""
        return {name: p.detach() for name, p in self.make().named_parameters()}

    def inner(self, params: Params, hyper: Any) -> Tensor:
        """Return the loss on the images."""
        return self.outer(params, hyper, Examples(hyper["images"], self.labels))

    def outer(self, params: Params, hyper: Any, batch: Examples) -> Tensor:
        """Return the loss on a batch."""
        return F.cross_entropy(functional_call(self._network, params, (batch.x,)), batch.y)

    def meta_gradient(self, params: Params, batch: Examples) -> dict[str, Tensor]:
        """Differentiate the loss on a batch, after training from ``params`` on, in images and log rate."""
        outer = partial(self.outer, batch=batch)
        return mg.hypergradient(outer, self.inner, params, self.hyper, method=self.method)

    def learn(
        self,
        real: Examples,
        *,
        steps: int,
        lr: float,
        batch: int,
        watch: Callable[[int, Examples, float], None] = lambda step, images, lr: None,
    ) -> tuple[Examples, float]:
        """Learn images and rate from real drawings, by Adam; return them.

        Args:
            real: What trained networks should do well on.
            steps: Outer steps.
            lr: The rate of the first; it falls by a cosine.
            batch: Real drawings of each.
            watch: Called before each with its number, and the images and the rate there are.
        """
        drawn = torch.randint(len(real.x), (steps, batch))
        found = mg.bilevel(
            self.outer,
            self.inner,
            self.fresh,
            self.hyper,
            inner=mg.optim.rules.sgd(lr=0.0),  # Unroll has steps of its own
            outer=mg.optim.rules.adam(lr=cosine(lr, steps)),
            steps=steps,
            inner_steps=0,
            method=self.method,
            warm_start=False,
            outer_batches=map(real.at, Progress(drawn, unit="step", leave=False)),
            callback=lambda step, params, hyper, loss: watch(step, *self._images(hyper)),
        )
        return self._images(found.hyper)

    def _images(self, hyper: Any) -> tuple[Examples, float]:
        return Examples(hyper["images"], self.labels), hyper["log_lr"].exp().item()


def cosine(lr: float, steps: int) -> list[float]:
    """Return rates that fall from ``lr`` towards zero.

    Example:
        >>> from experiments.studies.distill.learning import cosine
        >>> cosine(1.0, 2)
        [1.0, 0.5]
    """
    return [lr * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
