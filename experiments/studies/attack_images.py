r"""Attack images and defend them: `python -m experiments.studies.attack_images [preset=small] [KEY=VALUE ...]`.

Networks learn characters of Omniglot with a defense: a penalty on derivatives of the loss with respect to the image,
adversarial training, or none. First-order attacks and Newton's method then search for adversarial examples in the box
of images that differ by at most epsilon in each pixel. Cost is counted in gradients. A forward and backward pass
with respect to the input is one gradient, and a Hessian-vector product counts as two gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from experiments.run.files import markdown
from experiments.run.measure import cpu_seconds
from experiments.run.plots.style import BLUE, GREEN, INK, ORANGE, VERMILION, figure, label_lines
from experiments.run.schema import key
from experiments.studies import characters as omniglot
from experiments.studies.characters import Examples, by_drawers
from experiments.studies.study import Cell, Result, Study, StudyConfig, Work, by_cell, spread

PRODUCT = 2.0  # gradients that a Hessian-vector product counts as
DRAWERS = 20
SHARPNESS = 5.0  # of softplus: close to ReLU, but with curvature
ROUND = 2.5  # total length of the steps of a sign attack, in units of epsilon
FLAT = 1e-3  # minimum slope of a pixel, relative to the mean slope of the image
TIMINGS = 5
ALL = "all attacks"
DEFENCES = {
    "plain": ("none", INK),
    "gradient": ("gradient penalty", ORANGE),
    "cure": ("CURE", BLUE),
    "curvature": ("Hessian penalty", GREEN),
    "adversarial": ("adversarial training", VERMILION),
}
ATTACKS = ("I-FGSM", "PGD", "PGD, margin", "Newton", "Newton, margin")


@dataclass
class DefenseConfig:
    """The strengths of the defenses."""

    gradient: float = key("Weight of the squared norm of the gradient with respect to the image.")
    cure: float = key("Weight of the squared change of that gradient along its sign (CURE).")
    curvature: float = key("Weight of the squared Hessian-vector product with that sign, times h squared.")
    h: float = key("Length of CURE's step, in the Euclidean norm.")
    epsilon: float = key("Bound of adversarial training on the change of a pixel; one of epsilons.")
    attack_steps: int = key("Steps of PGD in adversarial training.")


@dataclass
class ImagesConfig(StudyConfig):
    """Each seed has its own characters and test images."""

    defenses: list[str] = key("The networks that are trained: plain, gradient, cure, curvature, adversarial.")
    classes: int = key("Characters of Omniglot's background set.")
    held_out: int = key("Number of test images of each character, of 20.")
    width: int = key("Channels of the first convolution; the others have twice as many.")
    steps: int = key("Steps of Adam; a defense starts after a quarter, and is complete after two thirds.")
    batch: int = key("Images of a step.")
    lr: float = key("The highest learning rate of a one-cycle schedule.")
    defense: DefenseConfig = field(default_factory=DefenseConfig)
    epsilons: list[float] = key("Bounds of the attacks on the change of a pixel.")
    gradients: list[int] = key("Budgets of an attack, ascending.")
    cg_steps: int = key("The most conjugate gradient steps of a Newton step.")


def characters(config: ImagesConfig, seed: int) -> tuple[Examples, Examples]:
    """Sample characters and held-out writers, and return training and test images."""
    generator = torch.Generator().manual_seed(seed)
    images = omniglot.load("background", config.classes, generator=generator, key="attack_images: classes")
    order = torch.randperm(DRAWERS, generator=generator)
    train, test = by_drawers(images[:, order].unsqueeze(2), DRAWERS - config.held_out, config.held_out)
    return train, test


def network(classes: int, width: int, size: int) -> nn.Sequential:
    """Return a smooth network of three convolutions that halve the image, and a linear layer."""
    layers: list[nn.Module] = []
    for before, after, kernel in ((1, width, 5), (width, 2 * width, 3), (2 * width, 2 * width, 3)):
        layers += [nn.Conv2d(before, after, kernel, stride=2, padding=kernel // 2), nn.Softplus(SHARPNESS)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * (-(-size // 8)) ** 2, classes))


def is_right(model: nn.Module, images: Examples) -> Tensor:
    """Return whether each image is classified correctly, ``[n]``."""
    with torch.no_grad():
        return model(images.x).argmax(1) == images.y


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each image."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Return the best incorrect logit minus the correct logit (Carlini, Wagner, S&P 2017, section V)."""
    right = logits.gather(1, y[:, None])
    return logits.scatter(1, y[:, None], -torch.inf).amax(1) - right[:, 0]


class Box(NamedTuple):
    """Images that an attack may return."""

    low: Tensor
    high: Tensor
    epsilon: float

    @classmethod
    def around(cls, x: Tensor, epsilon: float) -> Box:
        """Return the box of images that differ from ``x`` by at most epsilon."""
        return cls((x - epsilon).clamp_min(0), (x + epsilon).clamp_max(1), epsilon)

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest images of the box."""
        return torch.maximum(torch.minimum(x, self.high), self.low)


Loss = Callable[[Tensor, Tensor], Tensor]
Attack = Callable[[nn.Module, Examples, Box, int, torch.Generator], Iterator[tuple[Tensor, float]]]
"""Yields iterates in a box with the gradients spent so far, up to a budget."""


def sign_steps(
    loss: Loss,
    from_random: bool,
    model: nn.Module,
    images: Examples,
    box: Box,
    gradients: int,
    generator: Any,
) -> Iterator[tuple[Tensor, float]]:
    """Step along the sign of the gradient: FGSM is one step, I-FGSM several, PGD several from a random start.

    Goodfellow, Shlens, Szegedy, ICLR 2015. Kurakin, Goodfellow, Bengio, ICLR 2017 workshop. Madry et al., ICLR 2018.
    """
    x, size = images.x, box.epsilon * min(1.0, ROUND / gradients)
    if from_random:
        x = box.low + (box.high - box.low) * torch.rand(x.shape, generator=generator)
    for step in range(gradients):
        x = x.detach().requires_grad_()
        g = mg.grad(loss(model(x), images.y).sum(), x)
        x = box.nearest(x.detach() + size * g.sign())
        yield x, step + 1.0


def newton_steps(
    loss: Loss, steps: int, model: nn.Module, images: Examples, box: Box, gradients: int, generator: Any
) -> Iterator[tuple[Tensor, float]]:
    """Take Newton steps until the gradients are spent."""
    x, spent = images.x, 0.0
    while spent < gradients:
        d, products = newton_step(loss, steps, model, x, images.y, box)
        x, spent = box.nearest(x + d), spent + 1 + PRODUCT * products
        yield x, spent


def newton_step(
    loss: Loss, steps: int, model: nn.Module, x: Tensor, y: Tensor, box: Box
) -> tuple[Tensor, int]:
    r"""Return a step of Newton's method for bounds, and the Hessian-vector products that it took.

    .. math:: (I + W H W) \, e = -W g, \qquad d = W e, \qquad W^2 = \mathrm{diag}(r / |g|), \qquad |e| \le |W g|

    for the negative loss, where r is the distance that a pixel may still move downhill. Without curvature :math:`d =
    -r \, \mathrm{sign}(g)` is the step of FGSM to the corner of the box. Conjugate gradients change the step, and end
    on the radius at negative curvature. Coleman, Li, "An interior trust region approach for nonlinear minimization
    subject to bounds", SIAM J. Optim. 6(2), 1996, sections 2 and 3. Steihaug, SIAM J. Numer. Anal. 20(3), 1983.
    """
    x = x.detach().requires_grad_()
    g, product = derivatives(-loss(model(x), y), x)
    room = torch.where(g > 0, (x - box.low).detach().flatten(1), (box.high - x).detach().flatten(1))
    slopes = g.abs() + FLAT * g.abs().mean(1, keepdim=True) + torch.finfo(g.dtype).tiny
    W = (room / slopes).sqrt()
    e, products = steihaug(lambda rows: rows + W * product(W * rows), -W * g, steps)
    return (W * e).view_as(x), products


def derivatives(
    losses: Tensor, x: Tensor, *, create_graph: bool = False
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the gradient of each loss with respect to its own image, and its Hessian-vector product, as rows."""
    (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)

    def product(rows: Tensor) -> Tensor:
        v = rows.detach().view_as(x)
        options = {"retain_graph": True, "create_graph": create_graph, "materialize_grads": True}
        (found,) = torch.autograd.grad(g, x, v, **options)  # zero where the loss is linear
        return found.flatten(1)

    return (g if create_graph else g.detach()).flatten(1), product


def steihaug(product: Callable[[Tensor], Tensor], b: Tensor, most: int) -> tuple[Tensor, int]:
    """Solve each row by conjugate gradients inside the sphere of radius ``|b|``, and count the products."""
    x, r, p = torch.zeros_like(b), b.clone(), b.clone()
    radius = torch.linalg.vector_norm(b, dim=1, keepdim=True)
    active, products = radius > 0, 0
    while products < most and bool(active.any()):
        Ap, products = product(p), products + 1
        rr, pAp = r.square().sum(1, keepdim=True), (p * Ap).sum(1, keepdim=True)
        alpha = rr / pAp
        outside = (pAp <= 0) | (torch.linalg.vector_norm(x + alpha * p, dim=1, keepdim=True) >= radius)
        alpha = torch.where(outside, to_sphere(x, p, radius), alpha)
        x = torch.where(active, x + alpha * p, x)
        r = r - alpha * Ap
        active = active & ~outside & (torch.linalg.vector_norm(r, dim=1, keepdim=True) > 0.01 * radius)
        p = torch.where(active, r + r.square().sum(1, keepdim=True) / rr * p, p)
    return x, products


def to_sphere(x: Tensor, p: Tensor, radius: Tensor) -> Tensor:
    """Return the length of the step along each row of ``p`` from ``x`` to a sphere around zero."""
    pp, xp, xx = (pair.sum(1, keepdim=True) for pair in (p * p, x * p, x * x))
    return ((xp.square() + pp * (radius.square() - xx)).clamp_min(0).sqrt() - xp) / pp


def attacks(cg_steps: int) -> dict[str, Attack]:
    """Return all attacks by name."""
    return {
        "I-FGSM": partial(sign_steps, cross_entropy, False),
        "PGD": partial(sign_steps, cross_entropy, True),
        "PGD, margin": partial(sign_steps, margin, True),
        "Newton": partial(newton_steps, cross_entropy, cg_steps),
        "Newton, margin": partial(newton_steps, margin, cg_steps),
    }


def penalized(
    defense: str, model: nn.Module, images: Examples, config: DefenseConfig
) -> tuple[Tensor, Tensor]:
    r"""Return the losses, and a penalty on their derivatives with respect to the images.

    ``gradient``: :math:`|\nabla_x \ell|^2` (Ross, Doshi-Velez, AAAI 2018). ``cure``: :math:`|\nabla \ell(x + h z)
    - \nabla \ell(x)|^2`, where z is the sign of the gradient, of norm 1 (Moosavi-Dezfooli et al., CVPR 2019,
    section 4). ``curvature``: :math:`h^2 |\nabla^2 \ell(x) \, z|^2`, its limit for small h.
    """
    x = images.x.detach().requires_grad_()
    losses = cross_entropy(model(x), images.y)
    g, product = derivatives(losses, x, create_graph=True)
    if defense == "gradient":
        return losses, config.gradient * squares(g)
    z = sign_direction(g)
    if defense == "curvature":
        return losses, config.curvature * config.h**2 * squares(product(z))
    ahead = (images.x + config.h * z.view_as(x)).detach().requires_grad_()
    there, _ = derivatives(cross_entropy(model(ahead), images.y), ahead, create_graph=True)
    return losses, config.cure * squares(there - g)


def objective(
    defense: str,
    model: nn.Module,
    images: Examples,
    config: DefenseConfig,
    strength: float,
    generator: torch.Generator,
) -> Tensor:
    """Return the cross-entropy: with a penalty, or of attacked images (Madry et al., ICLR 2018)."""
    if strength and defense in ("gradient", "cure", "curvature"):
        losses, penalty = penalized(defense, model, images, config)
        return losses.mean() + strength * penalty
    if strength and defense == "adversarial":
        box = Box.around(images.x, strength * config.epsilon)
        *_, (x, _) = sign_steps(cross_entropy, True, model, images, box, config.attack_steps, generator)
        images = images._replace(x=x.detach())
    return cross_entropy(model(images.x), images.y).mean()


def sign_direction(g: Tensor) -> Tensor:
    """Return the sign of each row, scaled to norm 1, as a constant."""
    z = g.detach().sign()
    return z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1)


def squares(rows: Tensor) -> Tensor:
    """Return the mean squared norm of the rows."""
    return rows.square().sum(1).mean()


def cell(config: ImagesConfig, defense: str, work: Work) -> Result:
    """Train a network, and return its accuracy under attacks, in percent of the test images."""
    train, test = characters(config, work.seed)
    model = network(config.classes, config.width, test.x.shape[-1])
    seconds = fit(model, train, config, defense, work)
    model.requires_grad_(False)
    return {
        "clean": percent(is_right(model, test)),
        "seconds_per_step": seconds / config.steps,
        **slope_and_curvature(model, test),
        "attacks": [attacked(model, test, epsilon, config, work.seed) for epsilon in config.epsilons],
    }


def fit(model: nn.Module, train: Examples, config: ImagesConfig, defense: str, work: Work) -> float:
    """Train with a defense that starts gradually, and return the CPU seconds."""
    generator = torch.Generator().manual_seed(work.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=config.steps)
    start = time.process_time()
    for step in range(config.steps):
        batch = train.at(torch.randint(len(train.x), (config.batch,), generator=generator))
        strength = min(1.0, max(0.0, (step / config.steps - 1 / 4) / (2 / 3 - 1 / 4)))
        loss = objective(defense, model, batch, config.defense, strength, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            work.log(step, {"train/loss": loss.item()})
    return time.process_time() - start


def slope_and_curvature(model: nn.Module, test: Examples) -> dict[str, float]:
    """Return norms of derivatives, and the cost of a Hessian-vector product in gradients."""
    x = test.x.detach().requires_grad_()
    g, product = derivatives(cross_entropy(model(x), test.y), x)
    curved = product(sign_direction(g))
    gradient = cpu_seconds(lambda: mg.grad(cross_entropy(model(x), test.y).sum(), x), TIMINGS)
    return {
        "slope": g.norm(dim=1).mean().item(),
        "curvature": curved.norm(dim=1).mean().item(),
        "product_in_gradients": cpu_seconds(lambda: product(curved), TIMINGS) / gradient,
    }


def attacked(
    model: nn.Module, test: Examples, epsilon: float, config: ImagesConfig, seed: int
) -> dict[str, Any]:
    """Return pairs of gradients and accuracy for each attack, and the accuracy under all attacks.

    The size of sign steps depends on their number, so each budget is a separate attack.
    """
    box, generator = Box.around(test.x, epsilon), torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {"epsilon": epsilon}
    right = is_right(model, test)
    for name, attack in attacks(config.cg_steps).items():
        points, has_own_runs = [], not name.startswith("Newton")
        for budget in config.gradients if has_own_runs else config.gradients[-1:]:
            standing, own = is_right(model, test), []
            for x, spent in attack(model, test, box, budget, generator):
                standing = standing & is_right(model, Examples(x, test.y))
                own.append([spent, percent(standing)])
            points += own[-1:] if has_own_runs else own
            right = right & standing
        found[name] = points
    return {**found, ALL: percent(right)}


def percent(right: Tensor) -> float:
    """Return the percentage of true elements."""
    return 100 * statistics.mean(right.tolist())


def at(result: Result, epsilon: float) -> dict[str, Any]:
    """Return the results of attacks with one perturbation size."""
    return next(one for one in result["attacks"] if one["epsilon"] == epsilon)


def report(results: list[Result], config: ImagesConfig) -> str:
    """Return the page."""
    found, bound = by_cell(results), config.defense.epsilon
    under = [["defense", "no attack", "FGSM", *ATTACKS]]
    costs = [
        ["defense", *map(str, config.epsilons), "norm of the gradient", "norm of H z", "CPU, over plain"]
    ]
    plain = {one["seed"]: one["seconds_per_step"] for one in found.get("plain", [])}
    for name, own in found.items():
        title, runs = DEFENCES[name][0], [at(one, bound) for one in own]
        columns = [[one["clean"] for one in own], [run["I-FGSM"][0][1] for run in runs]]
        columns += [[run[attack][-1][1] for run in runs] for attack in ATTACKS]
        under.append([title, *map(spread, columns)])
        total = (spread([at(one, epsilon)[ALL] for one in own]) for epsilon in config.epsilons)
        norms = (spread([one[name] for one in own], 2) for name in ("slope", "curvature"))
        ratios = [one["seconds_per_step"] / plain[one["seed"]] for one in own if one["seed"] in plain]
        costs.append([title, *total, *norms, spread(ratios) if ratios else "-"])
    product = spread([one["product_in_gradients"] for one in results], 2)
    return f"""# Images under attack

{config.classes} characters of Omniglot, {config.classes * config.held_out} test images. Accuracy in percent, mean and
standard deviation over {max(map(len, found.values()))} seeds, where a pixel may change by {bound}: after one gradient
for FGSM, {config.gradients[-1]} for each other attack.

{markdown(under)}

Accuracy under all attacks together, by how much a pixel may change. A Hessian-vector product took {product} gradients
of CPU time, and is counted as two.

{markdown(costs)}
"""


def figures(results: list[Result], config: ImagesConfig, folder: Path) -> list[Path]:
    """Draw accuracy over epsilon for all defenses, with the range over seeds."""
    path, x, bound = folder / "attack_images.png", [0.0, *config.epsilons], config.defense.epsilon
    with figure(path, size=(6.6, 4)) as axes:
        axis, ends = axes[0, 0], {}
        for name, own in by_cell(results).items():
            title, color = DEFENCES[name]
            values = [[one["clean"], *(at(one, epsilon)[ALL] for epsilon in x[1:])] for one in own]
            y = list(zip(*values, strict=True))
            axis.fill_between(x, list(map(min, y)), list(map(max, y)), color=color, alpha=0.1, linewidth=0)
            axis.plot(x, list(map(statistics.mean, y)), color=color, marker="o", markersize=3.5, label=title)
            ends[title] = statistics.mean(y[x.index(bound)])
        best, kept = max(ends.items(), key=lambda pair: pair[1])
        axis.set(xlabel="Perturbation size (L-inf)", ylabel="Accuracy under all attacks (%)", ylim=(0, 100))
        axis.set(xticks=x, title=f"{best} keeps the highest accuracy at {bound:g}: {kept:.0f} %")
        axis.grid(axis="y")
        label_lines(axis)
    return [path]


def check(config: ImagesConfig) -> None:
    """Raise `ValueError` for settings that do not fit together."""
    call, epsilon, epsilons = "attack_images", config.defense.epsilon, config.epsilons
    unknown = [name for name in config.defenses if name not in DEFENCES]
    if unknown or not config.defenses:
        raise ValueError(f"{call}: defenses must be some of {', '.join(DEFENCES)}, got {config.defenses}.")
    if config.held_out >= DRAWERS:
        raise ValueError(f"{call}: held_out must be below {DRAWERS}, got {config.held_out}.")
    if epsilon not in epsilons or not all(0 < one < 1 for one in epsilons):
        raise ValueError(
            f"{call}: epsilons must be between 0 and 1, defense.epsilon={epsilon} among them, got {epsilons}."
        )
    if not config.gradients or sorted(set(config.gradients)) != config.gradients:
        raise ValueError(f"{call}: gradients must be ascending, got {config.gradients}.")


def cells(config: ImagesConfig) -> list[Cell]:
    """Return a network for each defense and seed."""
    return [
        Cell(name, seed, partial(cell, config, name)) for seed in config.seeds for name in config.defenses
    ]


study = Study(
    "attack_images",
    ImagesConfig,
    cells=cells,
    report=report,
    figures=figures,
    check=check,
    free=["defenses"],
)

if __name__ == "__main__":
    study.main()
