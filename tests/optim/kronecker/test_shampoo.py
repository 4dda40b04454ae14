"""Shampoo against its paper's formulas."""

import pytest
import torch

import metagrad as mg
from metagrad.optim.kronecker.shampoo import shampoo
from tests.optim.cases import draw, steps


def power(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**exponent) @ vectors.T


def gradients_of(shape, num=3, tasks=()):
    return [draw({"w": shape}, seed=seed, tasks=tasks)["w"] for seed in range(num)]


@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_matrices_equal_the_paper(decay):
    lr, mu, eps, penalty = 0.1, 0.7, 1e-3, 0.05
    gradients = gradients_of((3, 2))
    w = start = draw({"w": (3, 2)}, seed=9)["w"]
    left, right, velocity = torch.zeros(3, 3).double(), torch.zeros(2, 2).double(), 0
    for t, g in enumerate(gradients, 1):
        kept, new = (1, 1) if decay == 1 else (decay, 1 - decay)
        left, right = kept * left + new * g @ g.T, kept * right + new * g.T @ g
        correction = 1 if decay == 1 else 1 - decay**t
        lower, upper = (power(m / correction + eps * torch.eye(len(m)), -1 / 4) for m in (left, right))
        velocity = mu * velocity + lower @ g @ upper
        w = (1 - lr * penalty) * w - lr * velocity
    rule = shampoo(lr, momentum=mu, eps=eps, weight_decay=penalty, decay=decay)
    torch.testing.assert_close(steps(rule, {"w": start}, gradients)[0], w, rtol=1e-10, atol=1e-12)


def test_tensors_of_four_axes_equal_the_paper():
    gradients = gradients_of((3, 2, 2, 3), num=2)
    stats = [torch.zeros(n, n).double() for n in (3, 2, 2, 3)]
    w = torch.zeros(3, 2, 2, 3).double()
    for g in gradients:
        for i in range(4):
            unfolded = g.movedim(i, 0).flatten(1)
            stats[i] = stats[i] + unfolded @ unfolded.T
        roots = [power(m + 0.01 * torch.eye(len(m)), -1 / 8) for m in stats]
        w = w - torch.einsum("abcd,ai,bj,ck,dl->ijkl", g, *roots)
    rule = shampoo(1.0, momentum=0.0, eps=0.01)
    got, _ = steps(rule, {"w": torch.zeros_like(w)}, gradients)
    torch.testing.assert_close(got, w, rtol=1e-10, atol=1e-12)


def test_scalars_are_moved_as_by_adagrad():
    rule = shampoo(1.0, momentum=0.0, eps=0.0)
    gradients = [torch.tensor(3.0, dtype=torch.float64), torch.tensor(-4.0, dtype=torch.float64)]
    w, _ = steps(rule, {"w": torch.tensor(0.0, dtype=torch.float64)}, gradients)
    assert float(w) == pytest.approx(-1 + 4 / 5, rel=1e-12)


def test_blocks_are_parameters_of_their_own():
    gradients = gradients_of((5, 3))
    rule = shampoo(0.1, eps=1e-3, block_size=2)
    together, _ = steps(rule, {"w": torch.zeros(5, 3).double()}, gradients)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5)):
        for columns in (slice(0, 1), slice(1, 3)):
            parts = [g[rows, columns] for g in gradients]
            alone, _ = steps(rule, {"w": torch.zeros_like(parts[0])}, parts)
            torch.testing.assert_close(together[rows, columns], alone, rtol=1e-12, atol=1e-14)


def test_roots_are_renewed_at_intervals():
    gradients = gradients_of((3, 2), num=7)
    params = {"w": torch.zeros(3, 2).double()}
    rule = shampoo(0.1, root_every=3)
    state, seen = rule.init(params), []
    for g in gradients:
        params, state = rule.update({"w": g}, state, params)
        seen.append(state.roots["w"][0][0])
    renewed = [not torch.equal(a, b) for a, b in zip(seen[1:], seen, strict=False)]
    assert renewed == [True, True, True, False, False, True]


def test_a_grafted_step_has_the_length_of_adams():
    gradients = gradients_of((3, 2))
    start = {"w": torch.zeros(3, 2).double()}
    rules = (
        shampoo(0.1, momentum=0.0, graft=True, graft_decay=0.9, graft_eps=1e-3),
        shampoo(0.1, momentum=0.0),
        mg.optim.rules.adam(0.1, betas=(0.0, 0.9), eps=1e-3),
    )
    states = [rule.init(start) for rule in rules]
    for g in gradients:
        moved = []
        for i, rule in enumerate(rules):
            new, states[i] = rule.update({"w": g}, states[i], start)
            moved.append(new["w"])
        expected = moved[1] * moved[2].norm() / moved[1].norm()
        torch.testing.assert_close(moved[0], expected, rtol=1e-10, atol=1e-12)


def test_derivatives_are_right_at_equal_eigenvalues():
    """At a multiple of an orthogonal matrix all eigenvalues of L and R are equal. The derivative of eigh is NaN."""
    g = (2 * torch.linalg.qr(draw({"w": (3, 3)})["w"])[0]).requires_grad_()
    rule = shampoo(0.1, eps=0.1)
    assert mg.gradcheck(lambda g: steps(rule, {"w": torch.zeros_like(g)}, [g, g])[0], (g,), order=2)
