"""AdaHessian and Sophia against their papers' formulas, and estimates of diagonals against dense matrices."""

import math

import pytest
import torch
import torch.nn.functional as F

from metagrad.curvature.estimators.probes import fill
from metagrad.curvature.likelihoods import evaluate
from metagrad.optim import AdaHessian, SophiaG, SophiaH
from metagrad.optim.second_order.curvature_optimizer import BackwardPass, WeightedLoss
from tests.draws import draw
from tests.optim.torch_optim.cases import closure_of

F64 = torch.float64
C, START = [1.0, 3.0, 0.5], [1.0, -2.0, 0.7]


def quartic(w):
    """The sum of c w^4 / 12: gradient c w^3 / 3, diagonal c w^2."""
    return (torch.tensor(C, dtype=F64) * w**4 / 12).sum()


def known_diagonal(self, samples, params, graph, generators):
    return [torch.tensor(C, dtype=F64) * p.detach() ** 2 for p in params]


def assert_steps(opt, w, expected_step, steps):
    """Compare steps with a function from gradients and diagonals, in numbers, to new parameters."""
    expected = list(START)
    for t in range(steps):
        gradients = [c * x**3 / 3 for c, x in zip(C, expected, strict=True)]
        diagonals = [c * x**2 for c, x in zip(C, expected, strict=True)]
        expected = expected_step(t, expected, gradients, diagonals)
        opt.step(closure_of(opt, lambda: quartic(w)))
        torch.testing.assert_close(w.detach(), torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-2},
        {"hessian_power": 0.5, "weight_decay": 0.1},
        {"hessian_power": 0.0, "lr": torch.tensor(0.1)},
        {"maximize": True},
    ],
    ids=str,
)
def test_adahessian_is_the_papers_formula(options):
    """Algorithm 1 and equations 8 to 12. A probe of signs is exact for a diagonal Hessian."""
    given = {"lr": 0.15, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.0, "hessian_power": 1.0}
    at = {**given, **options, "lr": float(options.get("lr", 0.15))}
    (b1, b2), k, sign = at["betas"], at["hessian_power"], -1 if at.get("maximize") else 1
    m, v = [0.0] * 3, [0.0] * 3

    def expected(t, w, gradients, diagonals):
        new = []
        for i in range(3):
            m[i] = b1 * m[i] + (1 - b1) * sign * gradients[i]
            v[i] = b2 * v[i] + (1 - b2) * diagonals[i] ** 2
            scale = math.sqrt(v[i] / (1 - b2 ** (t + 1))) ** k
            step = at["lr"] * (m[i] / (1 - b1 ** (t + 1))) / (scale + at["eps"])
            new.append(w[i] * (1 - at["lr"] * at["weight_decay"]) - step)
        return new

    w = torch.tensor(START, dtype=F64, requires_grad=True)
    assert_steps(AdaHessian([w], **options), w, expected, 4)


@pytest.mark.parametrize("make", [SophiaH, SophiaG])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.3, "betas": (0.5, 0.6), "gamma": 2.0, "eps": 1e-2, "curvature_every": 2},
        {"lr": 0.1, "weight_decay": 0.2, "curvature_every": 3},
        {"lr": 0.1, "gamma": 1.0, "maximize": True},
    ],
    ids=str,
)
def test_sophia_is_the_papers_formula(make, options, monkeypatch):
    """Algorithm 3, with the exact diagonal in place of an estimate."""
    monkeypatch.setattr(make, "_diagonal", known_diagonal)
    monkeypatch.setattr(make, "notes_losses", False)
    gamma = 0.01 if make is SophiaH else 0.05
    given = {"lr": 4e-3, "betas": (0.96, 0.99), "gamma": gamma, "eps": 1e-12, "weight_decay": 0.0}
    at = {**given, "curvature_every": 10, **options}
    (b1, b2), sign = at["betas"], -1 if at.get("maximize") else 1
    m, h = [0.0] * 3, [0.0] * 3

    def expected(t, w, gradients, diagonals):
        new = []
        for i in range(3):
            m[i] = b1 * m[i] + (1 - b1) * sign * gradients[i]
            if t % at["curvature_every"] == 0:
                h[i] = b2 * h[i] + (1 - b2) * sign * diagonals[i]
            step = max(-1.0, min(1.0, m[i] / max(at["gamma"] * h[i], at["eps"])))
            new.append(w[i] * (1 - at["lr"] * at["weight_decay"]) - at["lr"] * step)
        return new

    w = torch.tensor(START, dtype=F64, requires_grad=True)
    assert_steps(make([w], **options), w, expected, 7)


X, Y = draw(5, 3, seed=2), torch.tensor([0, 1, 1, 0, 1])


def logits(w):
    return (X @ w.t()).tanh() * 2


def observed(weight=1.0):
    """Return a parameter, and the backward pass of a loss of known form."""
    w = draw(2, 3).requires_grad_()
    value, known = evaluate(F.cross_entropy, logits(w), Y)
    (grad,) = torch.autograd.grad(value, [w], create_graph=True)
    return w, BackwardPass(value, {w: grad}, [WeightedLoss(known, torch.tensor(weight, dtype=F64))], True)


def estimate_of(make, w, graph, generator, samples=1):
    """Return the estimate of the diagonal by an optimizer."""
    (found,) = make([w])._diagonal(samples, [w], graph, {generator.device: generator})
    return found


def dense_hessian():
    return torch.func.hessian(lambda w: F.cross_entropy(logits(w.view(2, 3)), Y))(draw(2, 3).flatten())


def dense_gauss_newton():
    jacobian = torch.func.jacrev(lambda w: logits(w.view(2, 3)).flatten())(draw(2, 3).flatten())
    of_output = torch.func.hessian(lambda z: F.cross_entropy(z.view(5, 2), Y))
    return jacobian.t() @ of_output(logits(draw(2, 3)).flatten()) @ jacobian


@pytest.mark.parametrize("kind", ["signs", "labels"])
def test_estimates_converge_with_the_root_of_the_samples(kind):
    generator = torch.Generator().manual_seed(0)
    exact = (dense_gauss_newton() if kind == "labels" else dense_hessian()).diagonal()
    make = SophiaG if kind == "labels" else AdaHessian

    def estimate(samples):
        return estimate_of(make, *observed(), generator, samples).flatten() - exact

    errors = [
        torch.stack([estimate(samples) for _ in range(repeats)]).square().mean().sqrt().log()
        for samples, repeats in ((1, 512), (64, 16))
    ]
    assert float(errors[1] - errors[0]) / math.log(64) == pytest.approx(-0.5, rel=0.2)
    # One public implementation always draws -1, and so gets the sums of rows.
    assert (dense_hessian().sum(1) - exact).square().mean().sqrt() > 2 * errors[1].exp()


def test_the_gauss_newton_bartlett_estimate_is_the_papers():
    """Algorithm 2 of Sophia: B times the square of the mean gradient of the loss with drawn labels."""
    w, graph = observed()
    found = estimate_of(SophiaG, w, graph, torch.Generator().manual_seed(7))
    probabilities = logits(w).softmax(1).detach()
    labels = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(7)).flatten()
    (g,) = torch.autograd.grad(F.cross_entropy(logits(w), labels), w)
    torch.testing.assert_close(found, 5 * g**2)


def test_a_negative_weight_gives_a_negative_matrix():
    first, second = (
        estimate_of(SophiaG, *observed(weight), torch.Generator().manual_seed(0)) for weight in (1.0, -2.0)
    )
    torch.testing.assert_close(second, -2 * first)


def test_squares_of_small_gradients_of_float16():
    """A gradient of 1e-4 has the square 1e-8, which is zero in float16."""
    found = []
    for dtype in (torch.float16, F64):
        w = torch.zeros(1, dtype=torch.float16).to(dtype).requires_grad_()
        output = 1e-4 * w.expand(1, 2) * torch.tensor([1.0, -1.0], dtype=dtype)
        known = evaluate(F.cross_entropy, output, torch.tensor([0])).known
        graph = BackwardPass(w.sum(), {}, [WeightedLoss(known, w.new_ones(()))])
        found.append(estimate_of(SophiaG, w, graph, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(found[0].double(), found[1], rtol=2e-3, atol=0)
    assert found[0].item() > 0


@pytest.mark.parametrize("dtype", [torch.float16, F64])
def test_signs_are_fair_and_independent(dtype):
    drawn = fill(torch.empty(101, 33, dtype=dtype), "rademacher", torch.Generator().manual_seed(0))
    assert drawn.dtype == dtype
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    rows = drawn.double()
    assert abs(rows.mean()) < 4 / math.sqrt(rows.numel())
    assert (rows[:, 1:] * rows[:, :-1]).mean(0).abs().max() < 5 / math.sqrt(101)


@pytest.mark.parametrize("average", [True, False])
def test_kernels_are_averaged_over_their_positions(average):
    kernel = draw(2, 2, 3).requires_grad_()
    opt = AdaHessian([kernel], betas=(0.0, 0.0), spatial_average=average)
    scales = torch.arange(1.0, 13.0, dtype=F64).view(2, 2, 3)
    opt.step(closure_of(opt, lambda: (scales * kernel.square()).sum() / 2))
    expected = scales.mean(2, keepdim=True).expand(2, 2, 3) if average else scales
    torch.testing.assert_close(opt.state[kernel]["square"], expected.square() + torch.zeros_like(kernel))


def test_one_estimate_of_all_groups_has_one_number_of_samples():
    a, b = (torch.zeros(1, requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match=r"SophiaH\(params\): .*samples must be the same in all, got 1 and"):
        SophiaH([{"params": [a]}, {"params": [b], "samples": 2}])


def test_a_backward_pass_writes_the_gradients_of_leaves_as_torch_does():
    """The gradient of an intermediate tensor that retains it was added twice."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    opt, seen = AdaHessian([w]), []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    hidden = 2 * w
    hidden.retain_grad()
    with pytest.raises(
        ValueError, match=r"AdaHessian\.backward\(loss, inputs\): expected leaves of the graph"
    ):
        opt.backward(hidden.square().sum(), inputs=[hidden])
    for _ in range(2):
        opt.backward((2 * w).square().sum(), inputs=[w])
    torch.testing.assert_close(torch.stack(seen), torch.tensor([[8.0, 16.0], [16.0, 32.0]]))
    assert not w.grad.requires_grad
