"""Attacks on images: penalties and Newton steps against plain torch, boxes, the program."""

import pytest
import torch
import torch.nn.functional as F

from experiments.studies import attack_images
from experiments.studies.characters import Examples

CLASSES, SIZE, EPSILON = 3, 8, 0.1


@pytest.fixture
def images():
    """Return random images, which are of the classes in turn."""
    x = torch.rand(5, 1, SIZE, SIZE, dtype=torch.float64)
    return Examples(x, torch.arange(len(x)) % CLASSES)


@pytest.fixture
def model():
    return attack_images.network(CLASSES, 2, SIZE).double()


def settings(**options):
    values = {"gradient": 0.7, "cure": 0.9, "curvature": 1.1, "h": 1.5, "epsilon": EPSILON, "attack_steps": 2}
    return attack_images.DefenseConfig(**{**values, **options})


def loss_at(model, image, y):
    return F.cross_entropy(model(image[None]), y[None])


def textbook(defense, model, images, config):
    """Return the objective image by image, by torch.autograd."""
    terms = []
    for x, y in zip(*images, strict=True):
        x = x.clone().requires_grad_()
        value = loss_at(model, x, y)
        (g,) = torch.autograd.grad(value, x, create_graph=True)
        z = g.detach().sign() / g.detach().sign().norm()
        if defense == "gradient":
            penalty = config.gradient * g.square().sum()
        elif defense == "cure":
            ahead = (x + config.h * z).detach().requires_grad_()
            (there,) = torch.autograd.grad(loss_at(model, ahead, y), ahead, create_graph=True)
            penalty = config.cure * (there - g).square().sum()
        else:
            (image,) = torch.autograd.grad(g, x, z, create_graph=True)
            penalty = config.curvature * config.h**2 * image.square().sum()
        terms.append(value + 0.5 * penalty)
    return torch.stack(terms).mean()


@pytest.mark.parametrize("defense", ["gradient", "cure", "curvature"])
def test_the_gradient_of_a_penalty_is_that_of_a_naive_loop(model, images, defense):
    config, parameters = settings(), list(model.parameters())
    found = attack_images.objective(defense, model, images, config, 0.5, torch.Generator())
    expected = textbook(defense, model, images, config)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    pairs = (torch.autograd.grad(value, parameters) for value in (found, expected))
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-12)


def test_a_newton_step_solves_the_system_of_each_image(model, images):
    """With as many conjugate gradients as pixels, where the scaled Hessian is positive definite."""
    box = attack_images.Box.around(images.x, 0.01)
    found, _ = attack_images.newton_step(attack_images.margin, 2 * SIZE**2, model, images.x, images.y, box)
    solved = 0
    for i in range(len(images.x)):
        x, y = images.x[i].flatten(), images.y[i : i + 1]

        def loss(x, y=y):
            return -attack_images.margin(model(x.view(1, 1, SIZE, SIZE)), y)[0]

        g, H = torch.autograd.functional.jacobian(loss, x), torch.autograd.functional.hessian(loss, x)
        room = torch.where(g > 0, x - box.low[i].flatten(), box.high[i].flatten() - x)
        W = (room / (g.abs() + 1e-3 * g.abs().mean())).sqrt()
        A = torch.eye(len(x), dtype=x.dtype) + W[:, None] * H * W
        b, e = -W * g, found[i].flatten() / W
        if torch.linalg.eigvalsh(A)[0] <= 0:
            continue
        solved += 1
        is_inside = e.norm() < (1 - 1e-9) * b.norm()
        assert (A @ e - b).norm() <= 0.01 * b.norm() if is_inside else e.norm() <= (1 + 1e-9) * b.norm()
    assert solved


@pytest.mark.parametrize("name", attack_images.attacks(2))
def test_attacks_stay_in_the_box_and_raise_the_loss(model, images, name):
    box, attack = attack_images.Box.around(images.x, EPSILON), attack_images.attacks(2)[name]
    before = attack_images.cross_entropy(model(images.x), images.y).sum()
    costs = []
    for x, spent in attack(model, images, box, 6, torch.Generator().manual_seed(0)):
        assert (x - images.x).abs().max() <= EPSILON + 1e-12
        assert x.min() >= 0
        assert x.max() <= 1
        costs.append(spent)
    assert attack_images.cross_entropy(model(x), images.y).sum() > before
    assert sorted(set(costs)) == costs
    assert costs[-1] >= 6


@pytest.mark.slow
def test_the_small_program_writes_its_page(configured, strokes, tmp_path):
    text = attack_images.study.run(
        configured(attack_images.study, "preset=small", "steps=20", "defenses=[plain,curvature]"), tmp_path
    )
    assert "| Hessian penalty |" in text
    assert (tmp_path / "attack_images.png").stat().st_size > 0
