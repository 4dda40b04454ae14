"""SOAP against its paper's algorithms."""

import pytest
import torch

import metagrad as mg
from metagrad.optim.kronecker.soap import soap
from metagrad.optim.rules import adamw
from tests.optim.cases import draw, steps

B1, B2, EPS = 0.8, 0.9, 1e-6


def gradients_of(shape, num=5):
    return [draw({"w": shape}, seed=seed)["w"] for seed in range(num)]


def descending(matrix):
    return torch.linalg.eigh(matrix)[1].flip(-1)


def papers_iteration(matrix, basis):
    """Return algorithm 4, and the order that the columns had to be put into."""
    order = torch.diag(basis.T @ matrix @ basis).argsort(descending=True)
    return torch.linalg.qr(matrix @ basis[:, order])[0], order


@pytest.mark.parametrize("every", [1, 2])
def test_matrices_equal_the_paper(every):
    lr, penalty = 0.1, 0.05
    # The direction of the largest gradients changes, and with it the order of the columns of the basis.
    weights = torch.tensor([[5.0, 0.2]] * 2 + [[0.2, 9.0]] * 4, dtype=torch.float64)
    gradients = [row[:, None] * g for row, g in zip(weights, gradients_of((2, 2), num=6), strict=True)]
    w = start = draw({"w": (2, 2)}, seed=9)["w"]
    mean = second = left = right = torch.zeros(2, 2).double()
    orders = []
    for t, g in enumerate(gradients):
        left, right = B2 * left + (1 - B2) * g @ g.T, B2 * right + (1 - B2) * g.T @ g
        if t == 0:
            q_left, q_right = descending(left), descending(right)
        mean = B1 * mean + (1 - B1) * g
        second = B2 * second + (1 - B2) * (q_left.T @ g @ q_right) ** 2
        first = q_left.T @ mean @ q_right / (1 - B1 ** (t + 1))
        scaled = first / ((second / (1 - B2 ** (t + 1))).sqrt() + EPS)
        w = (1 - lr * penalty) * w - lr * q_left @ scaled @ q_right.T
        if t and t % every == 0:
            q_left, rows = papers_iteration(left, q_left)
            q_right, columns = papers_iteration(right, q_right)
            orders.append(rows.tolist())
            second = second[rows][:, columns]
    assert [1, 0] in orders
    rule = soap(lr, betas=(B1, B2), eps=EPS, weight_decay=penalty, shift=0.0, basis_every=every)
    torch.testing.assert_close(steps(rule, {"w": start}, gradients)[0], w, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "options"), [((), {}), ((4,), {}), ((3, 2), {"max_size": 1}), ((2, 2, 3), {"max_size": 1})]
)
def test_without_bases_it_is_adamw(shape, options):
    gradients, start = gradients_of(shape), {"w": draw({"w": shape}, seed=9)["w"]}
    rule = soap(0.1, betas=(B1, B2), weight_decay=0.1, **options)
    other = adamw(0.1, betas=(B1, B2), weight_decay=0.1)
    a, b = (steps(r, start, gradients)[0] for r in (rule, other))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 2), (4, 2, 2, 2)])
def test_turned_gradients_give_turned_steps(shape):
    """The first axis is turned by an orthogonal matrix: Adam's step depends on that, SOAP's does not."""
    q = torch.linalg.qr(draw({"w": (shape[0], shape[0])})["w"])[0]
    gradients = gradients_of(shape)
    start = {"w": torch.zeros(shape).double()}
    rule = soap(0.1, betas=(B1, B2), eps=1e-3, shift=0.0, weight_decay=0.0, basis_every=1)
    plain, _ = steps(rule, start, gradients)
    turned, _ = steps(rule, start, [torch.tensordot(q, g, 1) for g in gradients])
    torch.testing.assert_close(turned, torch.tensordot(q, plain, 1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "value", [torch.zeros(3, 3), torch.eye(3), torch.ones(3, 3)], ids=["zero", "eye", "ones"]
)
def test_derivatives_are_finite_where_eigenvalues_are_equal(value):
    g = value.double().requires_grad_()
    rule = soap(0.1, basis_every=1, eps=1e-2, shift=1e-3)
    level, _ = steps(rule, {"w": torch.zeros_like(g)}, [g, 2 * g, g])
    for _ in range(2):
        (level,) = torch.autograd.grad((level**3).sum() + level.sum(), g, create_graph=True)
        assert level.isfinite().all()


def test_derivatives_are_right_where_statistics_have_no_full_rank():
    """The eigenvectors of a null space are arbitrary. The shift selects them smoothly."""
    g = draw({"w": (5, 2)})["w"].requires_grad_()
    others = gradients_of((5, 2), num=2)
    rule = soap(0.1, basis_every=1, eps=1e-2, shift=1e-2)

    def moved(g):
        return steps(rule, {"w": torch.zeros_like(g)}, [g, *others])[0]

    assert mg.gradcheck(moved, (g,), order=2, eps=5e-6)  # the step is curved at the scale of the shift
