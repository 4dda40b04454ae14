from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import metagrad as mg
from metagrad.autograd.derivatives.graph_vjp import transposed_product
from metagrad.curvature.likelihoods.recognition import evaluate
from metagrad.optim import tape_curvature
from metagrad.optim.curvature import Diagonal, KnownDiagonal, needs_curvature
from metagrad.optim.diagonal.adahessian import adahessian
from metagrad.optim.diagonal.sophia import sophia_h
from metagrad.optim.first_order.sgd import sgd
from metagrad.optim.probes import drawn_like
from metagrad.optim.tape_curvature import TapeCurvature, WeightedLoss
from metagrad.optim.transforms.chain import chain
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.marks import slow

HESSIAN = Diagonal("hessian")
GAUSS_NEWTON = Diagonal("gauss_newton")


def seeded(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda device: generator


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters():
    return {"w": draw(2, 3).requires_grad_(), "b": draw(2, seed=1).requires_grad_()}


def logits(p, x):
    return (x @ p["w"].t() + p["b"]).tanh() * 2


X, Y = draw(5, 3, seed=2), torch.tensor([0, 1, 1, 0, 1])


def loss(p):
    return F.cross_entropy(logits(p, X), Y)


def flat_hessian(function, p):
    """The oracle: torch.func over one flat vector."""
    sizes = [value.numel() for value in p.values()]

    def of(vector):
        parts = vector.split(sizes)
        return function(
            {key: part.view(value.shape) for (key, value), part in zip(p.items(), parts, strict=True)}
        )

    return torch.func.jacrev(torch.func.jacrev(of))(flat(p).detach())


def flat(tree):
    return torch.cat([value.reshape(-1) for value in tree.values()])


def on_tape(p, **options):
    evaluated = evaluate(F.cross_entropy, logits(p, X), Y)
    grads = mg.grad(evaluated.value, p, create_graph=True)
    losses = [WeightedLoss(evaluated.known, torch.tensor(1.0, dtype=torch.float64))]
    return TapeCurvature(p, grads, losses=losses, **options)


def test_products_are_those_of_the_dense_hessian():
    p, v = parameters(), {"w": draw(2, 3, seed=3), "b": draw(2, seed=4)}
    torch.testing.assert_close(flat(on_tape(p).products(v)), flat_hessian(loss, p) @ flat(v))


def test_gauss_newton_products_are_those_of_the_dense_matrix():
    p, v = parameters(), {"w": draw(2, 3, seed=3), "b": draw(2, seed=4)}
    torch.testing.assert_close(flat(on_tape(p).gauss_newton_products(v)), dense_gauss_newton(p) @ flat(v))


def test_the_backward_pass_of_gauss_newton_products_is_recorded_once(monkeypatch):
    p, recorded = parameters(), []

    def counted(*args):
        recorded.append(args)
        return transposed_product(*args)

    monkeypatch.setattr(tape_curvature, "transposed_product", counted)
    curvature, dense = on_tape(p), dense_gauss_newton(p)
    for seed in range(3):
        v = {"w": draw(2, 3, seed=seed), "b": draw(2, seed=seed + 3)}
        torch.testing.assert_close(flat(curvature.gauss_newton_products(v)), dense @ flat(v))
    assert len(recorded) == 1


def dense_gauss_newton(p):
    jacobians = torch.func.jacrev(lambda p: logits(p, X))({key: value.detach() for key, value in p.items()})
    jacobian = torch.cat([j.reshape(10, -1) for j in jacobians.values()], 1)
    outputs = logits(p, X).detach()
    inner = torch.func.jacrev(torch.func.jacrev(lambda z: F.cross_entropy(z.view(5, 2), Y)))(
        outputs.reshape(-1)
    )
    return jacobian.t() @ inner @ jacobian


@pytest.mark.parametrize("distribution", ["rademacher", slow("normal")])
def test_the_hessian_diagonal_converges_with_the_root_of_the_samples(distribution):
    p = parameters()
    curvature, exact = on_tape(p, generators=seeded()), flat_hessian(loss, p).diagonal()
    errors = [
        rms(
            [
                flat(curvature.diagonal(Diagonal("hessian", count, distribution))) - exact
                for _ in range(repeats)
            ]
        )
        for count, repeats in ((1, 512), (8, 64), (64, 16))
    ]
    assert slope([1, 8, 64], errors) == pytest.approx(-0.5, rel=0.2)
    # One public implementation always draws -1, and so gets the sums of rows.
    assert rms([flat_hessian(loss, p).sum(1) - exact]) > 2 * errors[-1]


def test_the_gauss_newton_diagonal_converges_with_the_root_of_the_samples():
    p = parameters()
    curvature, exact = on_tape(p, generators=seeded()), dense_gauss_newton(p).diagonal()
    errors = [
        rms([flat(curvature.diagonal(GAUSS_NEWTON._replace(samples=count))) - exact for _ in range(repeats)])
        for count, repeats in ((1, 512), (8, 64), (64, 16))
    ]
    assert slope([1, 8, 64], errors) == pytest.approx(-0.5, rel=0.2)
    assert errors[-1] < 0.3 * exact.max()


def rms(differences):
    return torch.stack(differences).square().mean().sqrt().item()


def slope(counts, errors):
    x, y = ([math.log(value) for value in values] for values in (counts, errors))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )


def test_given_probes():
    p = parameters()
    dense, curvature = flat_hessian(loss, p), on_tape(p)
    units = [{"w": unit[:6].view(2, 3), "b": unit[6:]} for unit in torch.eye(8, dtype=torch.float64)]
    found = sum(flat(curvature.diagonal(HESSIAN, probes=[unit])) for unit in units)
    torch.testing.assert_close(found, dense.diagonal())
    torch.testing.assert_close(flat(curvature.diagonal(HESSIAN, probes=units)), dense.diagonal() / 8)


def test_results_are_differentiable_where_asked():
    fixed = parameters()
    units = [{"w": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}]

    def diagonals(w):
        p = {**fixed, "w": w}
        curvature = on_tape(p, create_graph=True)
        return flat(curvature.diagonal(HESSIAN, probes=units)), flat(
            on_tape(p, create_graph=True, generators=seeded()).diagonal(GAUSS_NEWTON)
        )

    assert mg.gradcheck(lambda w: sum((d**3).sum() for d in diagonals(w)), (fixed["w"],), order=2)
    plain = on_tape(fixed)
    assert not any(d.requires_grad for d in plain.diagonal(HESSIAN, probes=units).values())
    assert not any(d.requires_grad for d in plain.diagonal(GAUSS_NEWTON).values())
    assert not any(d.requires_grad for d in plain.gauss_newton_products(units[0]).values())


def test_a_product_of_the_sum_serves_all_tasks():
    stacked = {"w": draw(4, 2, 3).requires_grad_()}

    def task_loss(w):
        return (torch.tanh(w @ X.t()) ** 2).sum()

    losses = torch.stack([task_loss(w) for w in stacked["w"]])
    curvature = TapeCurvature(stacked, mg.grad(losses.sum(), stacked, create_graph=True), generators=seeded())
    v = draw(4, 2, 3, seed=5)
    found, diagonal = curvature.products({"w": v})["w"], curvature.diagonal(HESSIAN)["w"]
    probes = drawn_like(stacked["w"], "rademacher", seeded()(None))
    for task in range(4):
        own = {"w": stacked["w"][task].detach().requires_grad_()}
        alone = TapeCurvature(own, mg.grad(task_loss(own["w"]), own, create_graph=True))
        torch.testing.assert_close(found[task], alone.products({"w": v[task]})["w"])
        torch.testing.assert_close(diagonal[task], alone.diagonal(HESSIAN, probes=[{"w": probes[task]}])["w"])


def test_a_linear_loss_has_no_curvature():
    p = parameters()
    grads = mg.grad(p["w"].sum() + p["b"].pow(3).sum(), p, create_graph=True)
    found = TapeCurvature(p, grads).diagonal(HESSIAN)
    assert not found["w"].any()
    torch.testing.assert_close(found["b"], 6 * p["b"].detach())
    none = TapeCurvature(p, mg.grad(p["w"].sum() + p["b"].sum(), p, create_graph=True))
    assert not flat(none.diagonal(HESSIAN)).any()


def test_a_negative_weight_gives_a_negative_matrix():
    p = parameters()
    evaluated = evaluate(F.cross_entropy, logits(p, X), Y)
    one = torch.tensor(-2.0, dtype=torch.float64)
    grads = mg.grad(evaluated.value, p, retain_graph=True)

    def of(weight):
        losses = [WeightedLoss(evaluated.known, weight)]
        return flat(TapeCurvature(p, grads, losses=losses, generators=seeded()).diagonal(GAUSS_NEWTON))

    torch.testing.assert_close(of(one), -2 * of(-one / 2))


def test_without_a_known_loss_there_is_no_gauss_newton_matrix():
    p = parameters()
    curvature = TapeCurvature(p, mg.grad(loss(p), p))
    for ask in (
        lambda: curvature.diagonal(GAUSS_NEWTON),
        lambda: curvature.gauss_newton_products(parameters()),
    ):
        with pytest.raises(
            ValueError, match=r"TapeCurvature: .* needs a loss of known form.*F\.cross_entropy"
        ):
            ask()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_signs_are_fair_and_independent(dtype):
    like = torch.empty(101, 33, dtype=dtype)
    signs = drawn_like(like, "rademacher", torch.Generator().manual_seed(0))
    assert signs.dtype == dtype
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.double().mean()) < 4 / math.sqrt(like.numel())
    rows = signs.double()
    correlations = (rows[:, 1:] * rows[:, :-1]).mean(0).abs()
    assert correlations.max() < 5 / math.sqrt(101)


def test_probes_of_a_sparse_gradient_have_its_rows():
    gradient = RowSparse(torch.tensor([1, 4]), torch.zeros(2, 3), (6, 3))
    probe = drawn_like(gradient, "normal", None)
    assert isinstance(probe, RowSparse)
    assert probe.rows.tolist() == [1, 4]
    assert probe.values.all()


def test_a_known_diagonal_knows_nothing_else():
    known = KnownDiagonal({"w": torch.ones(1)})
    for name in ("products", "gauss_newton_products"):
        with pytest.raises(TypeError, match=rf"KnownDiagonal.{name}\(v\): only the diagonal is known"):
            getattr(known, name)({})


def test_rules_within_rules_are_asked():
    assert needs_curvature(adahessian(), 3)
    assert not needs_curvature(sgd(0.1), 0)
    inside = chain(sophia_h(curvature_every=3))
    assert [needs_curvature(inside, step) for step in range(4)] == [True, False, False, True]


def test_a_rule_in_a_chain_gets_curvature():
    p = parameters()
    rule = chain(adahessian(lr=0.5))
    new, _ = rule.update(mg.grad(loss(p), p), rule.init(p), p, on_tape(p))
    assert not torch.equal(new["w"], p["w"])


def test_squares_of_small_gradients_of_float16():
    """A gradient of 1e-4 has the square 1e-8, which is zero there."""
    found = []
    for dtype in (torch.float16, torch.float64):
        w = torch.zeros(1, dtype=torch.float16).to(dtype).requires_grad_()
        output = 1e-4 * w.expand(1, 2) * torch.tensor([1.0, -1.0], dtype=dtype)
        known = evaluate(F.cross_entropy, output, torch.tensor([0])).known
        curvature = TapeCurvature({"w": w}, {"w": w}, losses=[WeightedLoss(known, w.new_ones(()))])
        found.append(curvature.diagonal(GAUSS_NEWTON)["w"].double())
    torch.testing.assert_close(*found, rtol=2e-3, atol=0)
    assert found[0].item() > 0
