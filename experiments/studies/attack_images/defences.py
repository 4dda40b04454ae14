"""Defences: adversarial training, and penalties on derivatives of the loss in the image.

With a penalty, training differentiates twice, or three times where it is on the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import metagrad as mg
from experiments.studies.attack_images.attacks import Box, SignSteps, cross_entropy
from experiments.studies.characters import Examples

if TYPE_CHECKING:
    from experiments.studies.attack_images.schema import DefenceConfig


def gradient(model: nn.Module, images: Examples, config: DefenceConfig) -> tuple[Tensor, Tensor]:
    r"""Penalise :math:`|\nabla_x \ell|^2` (Ross, Doshi-Velez, AAAI 2018, "Input gradient regularization")."""
    losses, g = slopes(model, images)
    return losses, config.gradient * squares(g)


def cure(model: nn.Module, images: Examples, config: DefenceConfig) -> tuple[Tensor, Tensor]:
    r"""Penalise :math:`|\nabla \ell(x + h z) - \nabla \ell(x)|^2`, z along the sign of the gradient, of norm 1.

    Moosavi-Dezfooli, Fawzi, Uesato, Frossard, "Robustness via curvature regularization, and vice versa", CVPR 2019,
    section 4.
    """
    losses, g = slopes(model, images)
    _, ahead = slopes(model, images._replace(x=images.x + config.h * sign_direction(g)))
    return losses, config.cure * squares(ahead - g)


def curvature(model: nn.Module, images: Examples, config: DefenceConfig) -> tuple[Tensor, Tensor]:
    r"""Penalise :math:`h^2 |\nabla^2 \ell(x) \, z|^2`, which CURE's difference comes to for small h."""
    x = images.x.detach().requires_grad_()
    losses = cross_entropy(model(x), images.y)
    H = mg.hessian(losses.sum(), {"x": x}, create_graph=True)  # block-diagonal
    g = H.gradient.view(len(x), -1)
    product = (H @ sign_direction(g).flatten()).view_as(g)
    return losses, config.curvature * config.h**2 * squares(product)


PENALTIES: dict[str, Callable[[nn.Module, Examples, DefenceConfig], tuple[Tensor, Tensor]]] = {
    "gradient": gradient,
    "cure": cure,
    "curvature": curvature,
}
DEFENCES = ("plain", *PENALTIES, "adversarial")


def objective(
    defence: str,
    model: nn.Module,
    images: Examples,
    config: DefenceConfig,
    strength: float,
    generator: torch.Generator,
) -> Tensor:
    """Return the cross-entropy, with a penalty, or of attacked images (Madry et al., ICLR 2018)."""
    if strength and defence in PENALTIES:
        losses, penalty = PENALTIES[defence](model, images, config)
        return losses.mean() + strength * penalty
    if strength and defence == "adversarial":
        box, attack = Box.around(images.x, strength * config.epsilon), SignSteps(from_random=True)
        *_, (found, _) = attack(model, images, box, config.attack_steps, generator)
        images = images._replace(x=found.detach())
    return cross_entropy(model(images.x), images.y).mean()


def slopes(model: nn.Module, images: Examples) -> tuple[Tensor, Tensor]:
    """Return the losses ``[n]``, and their gradients in the images, on the tape."""
    x = images.x.detach().requires_grad_()
    losses = cross_entropy(model(x), images.y)
    return losses, mg.grad(losses.sum(), x, create_graph=True)


def sign_direction(g: Tensor) -> Tensor:
    """Return the sign of each image's gradient, of norm 1; a constant."""
    z = g.detach().sign()
    norms = torch.linalg.vector_norm(z.flatten(1), dim=1).clamp_min(1)
    return z / norms.view(-1, *[1] * (z.ndim - 1))


def squares(vectors: Tensor) -> Tensor:
    """Return the mean over images of the squared norm."""
    return vectors.square().flatten(1).sum(1).mean()
