r"""The search: weights of the mixed network descend on one half of the drawings, its architecture on the other.

.. math:: \min_\alpha L_{val}(w^*(\alpha), \alpha), \qquad w^*(\alpha) = \arg\min_w L_{train}(w, \alpha)

Liu, Simonyan, Yang, "DARTS: differentiable architecture search", ICLR 2019, algorithm 1, with any hypergradient:
first order, its difference of gradients, or an inverse of the training loss's Hessian (Zhang, Su, Pan, Chang,
Abbasnejad, Haffari, "iDARTS", ICML 2021). Along the search, the largest eigenvalue of the validation loss's Hessian
in the architecture (Zela, Elsken, Saikia, Marrakchi, Brox, Hutter, "Understanding and robustifying differentiable
architecture search", ICLR 2020, section 4).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import metagrad as mg
from experiments.run.allocations import peak_bytes
from experiments.run.progress import Progress
from experiments.run.schema import key
from experiments.run.seconds import cpu_seconds
from experiments.studies.search.data import Data
from experiments.studies.search.space import EDGES, OPERATIONS, Network, discrete
from metagrad import hypergrad
from metagrad.hypergrad import Method

Params = dict[str, Tensor]
TIMED = 3  # calls, of which the fastest counts
START = 1e-3
"""The standard deviation of the architecture's logits where it begins, as in DARTS."""


@dataclass
class SearchConfig:
    """The search of one architecture."""

    steps: int = key("Steps on the architecture.")
    inner_steps: int = key("Steps on the weights for each.")
    batch: int = key("Drawings of a step, at both levels.")
    lr: float = key("The rate of the weights.")
    momentum: float = key("Their momentum.")
    decay: float = key("Their penalty.")
    alpha_lr: float = key("The rate of Adam on the architecture.")
    products: int = key("Steps of CG, Neumann and Unroll.")
    damping: float = key("Added to the Hessian of the training loss by CG and Neumann.")
    scale: float = key("The factor of Neumann's series.")
    eigenvalue_every: int = key("Steps on the architecture from one eigenvalue to the next.")


METHODS: dict[str, Callable[[SearchConfig], Method]] = {
    "first_order": lambda c: hypergrad.FirstOrder(),
    "finite_difference": lambda c: hypergrad.FiniteDifference(lr=c.lr),
    "unroll": lambda c: hypergrad.Unroll(mg.optim.rules.sgd(lr=c.lr), steps=c.products),
    "cg": lambda c: hypergrad.CG(steps=c.products, damping=c.damping),
    "neumann": lambda c: hypergrad.Neumann(steps=c.products, scale=c.scale, damping=c.damping),
}
"""Hypergradients by name."""


class Search:
    """A mixed network, and the two losses of its weights and architecture."""

    def __init__(self, network: Network, data: Data, config: SearchConfig, seed: int) -> None:
        self.network, self.data, self.config, self.seed = network, data, config, seed
        self.params: Params = {name: p.detach() for name, p in network.named_parameters()}
        source = torch.Generator().manual_seed(seed)
        self.hyper = {"alpha": START * torch.randn(len(EDGES), len(OPERATIONS), generator=source)}

    def validation_loss(self, params: Params, hyper: Params, batch: Any) -> Tensor:
        """Return the cross-entropy of a batch."""
        x, y = batch
        return F.cross_entropy(functional_call(self.network, params, (x, hyper["alpha"])), y)

    def training_loss(self, params: Params, hyper: Params, batch: Any) -> Tensor:
        """Return the cross-entropy of a batch, with the penalty."""
        penalty = torch.stack([p.square().sum() for p in params.values()]).sum()
        return self.validation_loss(params, hyper, batch) + self.config.decay / 2 * penalty

    def eigenvalue(self, params: Params, hyper: Params, batch: Any) -> float:
        """Return the largest eigenvalue of the validation loss's Hessian in the architecture."""
        params = {name: p.detach() for name, p in params.items()}
        alpha = {"alpha": hyper["alpha"].detach().requires_grad_()}
        source = torch.Generator().manual_seed(self.seed)
        with mg.hessian(self.validation_loss(params, alpha, batch), alpha) as H:
            return H.eigenvalues(1, rtol=1e-2, vectors=False, generator=source).values.item()

    def run(self, method: Method, log: Callable[[int, dict[str, float]], None]) -> dict[str, Any]:
        """Search by a hypergradient; return the architecture, what was seen along the way, and what it cost."""
        config, eigenvalues, seconds = self.config, [], 0.0
        judged = next(iter(self.data.validation.batches(config.batch, self.seed)))

        def observe(step: int, params: Any, hyper: Any, loss: float) -> None:
            nonlocal seconds
            bar.update()
            if step % config.eigenvalue_every == 0 or step == config.steps - 1:
                began = time.process_time()
                eigenvalues.append((step, self.eigenvalue(params, hyper, judged)))
                log(step, {"loss/validation": loss, "eigenvalue/largest": eigenvalues[-1][1]})
                seconds -= time.process_time() - began

        seconds -= time.process_time()
        steps = Progress(total=config.steps, unit="step", leave=False)
        with warnings.catch_warnings(), steps as bar:
            # A few products are no solution; how far from one is what is compared here.
            warnings.filterwarnings("ignore", message=".*left a residual")
            found = mg.bilevel(
                self.validation_loss,
                self.training_loss,
                self.params,
                self.hyper,
                inner=mg.optim.rules.sgd(lr=config.lr, momentum=config.momentum),
                outer=mg.optim.rules.adam(lr=config.alpha_lr, betas=(0.5, 0.999)),
                steps=config.steps,
                inner_steps=config.inner_steps,
                method=method,
                inner_batches=self.data.train.batches(config.batch, self.seed),
                outer_batches=self.data.validation.batches(config.batch, self.seed + 1),
                callback=observe,
            )
            seconds += time.process_time()
            cost = self.cost(method, found.params, found.hyper)
        return {
            "architecture": discrete(found.hyper["alpha"]),
            "alpha": found.hyper["alpha"].tolist(),
            "seconds": seconds,
            "eigenvalues": eigenvalues,
            "validation_losses": found.outer_losses.tolist(),
            "training_losses": found.inner_losses.tolist(),
            **cost,
        }

    def cost(self, method: Method, params: Any, hyper: Any) -> dict[str, float]:
        """Measure one hypergradient, beside one gradient of the training loss in the weights."""
        config = self.config
        batches = (part.batches(config.batch, self.seed) for part in (self.data.validation, self.data.train))
        outer, inner = (
            partial(loss, batch=next(iter(own)))
            for loss, own in zip((self.validation_loss, self.training_loss), batches, strict=True)
        )

        def one() -> object:
            return mg.hypergradient(outer, inner, params, hyper, method=method)

        def unit() -> object:
            leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
            return mg.grad(inner(leaves, hyper), leaves)

        return {
            "gradients": cpu_seconds(one, TIMED) / cpu_seconds(unit, TIMED),
            "peak(MiB)": peak_bytes(one) / 2**20,
            "gradient peak(MiB)": peak_bytes(unit) / 2**20,
        }
