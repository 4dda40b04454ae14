r"""Attacks within a box: the images that differ by at most epsilon in each pixel, with levels in [0, 1].

An attack yields iterates, each with the gradients that it has taken so far. One is a pass forwards and backwards to
the input; a product with the Hessian counts as :data:`PRODUCT` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.studies.characters import Examples
from metagrad.optim.newton.krylov import conjugate_gradients

PRODUCT = 2.0
_ROUND = 2.5  # how far the steps of a sign attack go in all, in units of epsilon
_FLAT = 1e-3  # slopes below this part of an image's mean are taken for as large

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits and classes: what an attack raises, ``[n]``."""


class Box(NamedTuple):
    """Images that an attack may return."""

    low: Tensor
    high: Tensor
    epsilon: float

    @classmethod
    def around(cls, x: Tensor, epsilon: float) -> Box:
        """Return the box of images that differ from ``x`` by epsilon."""
        return cls((x - epsilon).clamp_min(0), (x + epsilon).clamp_max(1), epsilon)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest images of the box."""
        return torch.maximum(torch.minimum(x, self.high), self.low)

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw from the box."""
        return self.low + (self.high - self.low) * torch.rand(self.low.shape, generator=generator)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return that of each image."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Return by how much the best wrong class is above the right one (Carlini, Wagner, S&P 2017, section V)."""
    right = logits.gather(1, y[:, None])
    return logits.scatter(1, y[:, None], -torch.inf).amax(1) - right[:, 0]


Attack = Callable[[nn.Module, Examples, Box, int, torch.Generator], Iterator[tuple[Tensor, float]]]
"""Yields iterates in a box, and the gradients that they took: about as many as it is told."""


@dataclass(frozen=True)
class SignSteps:
    """Steps along the sign of the gradient: FGSM is one, I-FGSM several, PGD such from a random start.

    Goodfellow, Shlens, Szegedy, ICLR 2015; Kurakin, Goodfellow, Bengio, ICLR 2017 workshop; Madry et al., ICLR 2018.
    """

    loss: Loss = cross_entropy
    from_random: bool = False

    def __call__(
        self, model: nn.Module, images: Examples, box: Box, gradients: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, float]]:
        """Take as many steps as gradients."""
        x = box.draw(generator) if self.from_random else images.x
        size = box.epsilon * min(1.0, _ROUND / gradients)
        for step in range(gradients):
            x = x.detach().requires_grad_()
            g = mg.grad(self.loss(model(x), images.y).sum(), x)
            x = box.nearest(x.detach() + size * g.sign())
            yield x, step + 1.0


@dataclass(frozen=True)
class Newton:
    r"""Newton's method for bounds, each step by a few conjugate gradients on the Hessians in the pixels.

    .. math:: (I + W H W) \, e = -W g, \qquad d = W e, \qquad W^2 = \mathrm{diag}(r / |g|), \qquad |e| \le |W g|

    of the negative loss, where r is how far a pixel may still go downhill. Without curvature :math:`d = -r \,
    \mathrm{sign}(g)` is the step of FGSM to the corner of the box; conjugate gradients bend it, and end on the radius
    where they meet negative curvature. Coleman, Li, "An interior trust region approach for nonlinear minimization
    subject to bounds", SIAM J. Optim. 6(2), 1996, sections 2 and 3; Steihaug, SIAM J. Numer. Anal. 20(3), 1983.

    Args:
        loss: What is raised.
        steps: The most of conjugate gradients.
    """

    loss: Loss
    steps: int

    def __call__(
        self, model: nn.Module, images: Examples, box: Box, gradients: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, float]]:
        """Step until the gradients are spent."""
        x, spent = images.x, 0.0
        while spent < gradients:
            d, products = self.step(model, x, images.y, box)
            x, spent = box.nearest(x + d), spent + 1 + PRODUCT * products
            yield x, spent

    def step(self, model: nn.Module, x: Tensor, y: Tensor, box: Box) -> tuple[Tensor, int]:
        """Return the step, and the products that it took; all images in one solve, each with its own Hessian."""
        x = x.detach().requires_grad_()
        # The Hessian of the sum is block-diagonal, with the Hessian of each image.
        with mg.hessian(-self.loss(model(x), y).sum(), {"x": x}) as H:
            g = H.gradient.view(len(x), -1)
            room = torch.where(g > 0, (x - box.low).detach().flatten(1), (box.high - x).detach().flatten(1))
            slopes = g.abs() + _FLAT * g.abs().mean(1, keepdim=True) + torch.finfo(g.dtype).tiny
            W = (room / slopes).sqrt()
            b = -W * g
            found = conjugate_gradients(
                lambda rows: rows + W * (H @ (W * rows).flatten()).view_as(rows),
                b,
                radius=torch.linalg.vector_norm(b, dim=1),
                rtol=0.01,
                max_steps=self.steps,
            )
        return (W * found.x).view_as(x), found.products


def attacks(steps: int) -> dict[str, Attack]:
    """Return all attacks by name."""
    return {
        "I-FGSM": SignSteps(),
        "PGD": SignSteps(from_random=True),
        "PGD, margin": SignSteps(margin, from_random=True),
        "Newton": Newton(cross_entropy, steps),
        "Newton, margin": Newton(margin, steps),
    }
