from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad

import metagrad as mg
from metagrad.optim.curvature import KnownDiagonal
from metagrad.optim.diagonal.adahessian import adahessian, power, spatially_averaged
from metagrad.optim.rule import with_batch_ndim
from metagrad.optim.tape_curvature import TapeCurvature
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.optim.cases import formed, scalar

OPTIONS = [
    {},
    {"lr": 0.3, "betas": (0.5, 0.6), "eps": 1e-2},
    {"hessian_power": 0.5, "weight_decay": 0.1},
    {"hessian_power": 0.0},
    {"maximize": True},
]


def as_tensors(options):
    return formed(options, lambda v: scalar(v) if type(v) is float else v)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_papers_formula_on_three_parameters(options, tensors):
    """Algorithm 1 and equations 8 to 12, on f = sum of c w^4 / 12: gradient c w^3 / 3, diagonal c w^2."""
    c, w = [1.0, 3.0, 0.5], [1.0, -2.0, 0.7]
    given = {"lr": 0.15, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.0, "hessian_power": 1.0}
    at = {**given, **options}
    (b1, b2), k, sign = at["betas"], at["hessian_power"], -1 if at.get("maximize") else 1
    m, v = [0.0] * 3, [0.0] * 3
    coefficients = torch.tensor(c, dtype=torch.float64)
    params = {"w": torch.tensor(w, dtype=torch.float64, requires_grad=True)}
    rule = adahessian(**(as_tensors(options) if tensors else options))
    state = rule.init(params)
    for t in range(1, 5):
        for i in range(3):
            gradient, diagonal = sign * c[i] * w[i] ** 3 / 3, c[i] * w[i] ** 2
            m[i] = b1 * m[i] + (1 - b1) * gradient
            v[i] = b2 * v[i] + (1 - b2) * diagonal**2
            scale = math.sqrt(v[i] / (1 - b2**t)) ** k
            step = at["lr"] * (m[i] / (1 - b1**t)) / (scale + at["eps"])
            w[i] = w[i] * (1 - at["lr"] * at["weight_decay"]) - step
        grads = mg.grad((coefficients * params["w"] ** 4 / 12).sum(), params, create_graph=True)
        params, state = rule.update(grads, state, params, TapeCurvature(params, grads))
        params = {"w": params["w"].detach().requires_grad_()}
        torch.testing.assert_close(
            params["w"].detach(), torch.tensor(w, dtype=torch.float64), rtol=1e-12, atol=1e-14
        )
    assert state.step == 4


def coupled(p):
    return (torch.tanh(p["w"] + p["b"]) ** 2).sum() + p["b"].pow(4).sum()


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in {"w": (3, 2), "b": (2,)}.items()
    }


def unrolled(p, rule, steps=2, memory="full"):
    def step(state, t):
        current, rule_state = state
        grads = mg.grad(coupled(current), current, create_graph=True)
        curvature = TapeCurvature(current, grads, create_graph=True)
        return rule.update(grads, rule_state, current, curvature), None

    (last, _), _ = mg.unroll(step, (p, rule.init(p)), steps=steps, memory=memory)
    return coupled(last)


# Without the power 0: where an estimate is 0, its power jumps from 0 to 1 there.
@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("hessian_power") != 0], ids=str)
def test_unrolled_steps_pass_gradcheck_in_parameters_and_hyperparameters(options):
    fixed, hyper = parameters(), as_tensors({"lr": 0.05, "eps": 0.5, **options})

    def fn(w, hyper):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same probes each time
            return unrolled({**fixed, "w": w}, adahessian(**hyper))

    assert mg.gradcheck(fn, (fixed["w"], hyper), order=2)


def test_recomputed_steps_draw_the_same_probes():
    results = []
    for memory in ("full", "step", "sqrt"):
        p = parameters()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            results.append(mg.grad(unrolled(p, adahessian(lr=0.05, eps=0.5), 4, memory), p))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_no_curvature_and_no_gradient_give_no_nan_at_any_order():
    """higher#125, for the root of an average of squared diagonals that is zero."""
    p = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)}
    lr = scalar(0.05)
    rule = adahessian(lr=lr, hessian_power=scalar(1.0))
    state, current = rule.init(p), p
    for _ in range(2):
        loss = (current["w"] * torch.tensor([0.0, 1.0])).pow(2).sum()
        grads = mg.grad(loss, current, create_graph=True)
        current, state = rule.update(grads, state, current, TapeCurvature(current, grads, create_graph=True))
    level = current["w"].pow(2).sum()
    for _ in range(3):
        grads = mg.grad(level, (p["w"], lr), create_graph=True, materialize_grads=True)
        assert all(g.isfinite().all() for g in grads)
        level = sum((g**3).sum() for g in grads)


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.5, 1.0])
def test_power_at_zero_and_elsewhere(exponent):
    x = torch.tensor([0.0, 4.0], dtype=torch.float64, requires_grad=True)
    for form in (exponent, torch.tensor(exponent, dtype=torch.float64)):
        y = power(x, form)
        assert y.tolist() == [0.0**exponent, 4.0**exponent]
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert first.tolist() == [0, exponent * 4.0 ** (exponent - 1)]


def test_kernels_are_averaged_over_their_positions():
    for shape in ((4, 3, 5), (4, 3, 2, 5), (4, 3, 2, 2, 5)):
        diagonal = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        averaged = spatially_averaged(diagonal)
        assert averaged.shape == diagonal.shape
        torch.testing.assert_close(
            averaged, diagonal.flatten(2).mean(2).view(4, 3, *[1] * (len(shape) - 2)).expand(shape)
        )
    assert spatially_averaged(torch.ones(4, 3)).shape == (4, 3)


@pytest.mark.parametrize("average", [True, False])
def test_stacked_tasks_are_not_taken_for_positions(average):
    rule = adahessian(lr=0.5, spatial_average=average)
    stacked = with_batch_ndim(rule, 1)
    params = {"kernel": torch.zeros(2, 4, 3, 5), "matrix": torch.zeros(2, 4, 3)}
    generator = torch.Generator().manual_seed(0)
    grads, diagonals = (
        {key: torch.randn(p.shape, generator=generator) for key, p in params.items()} for _ in range(2)
    )
    found, _ = stacked.update(grads, stacked.init(params), params, KnownDiagonal(diagonals))
    for task in range(2):
        own, g, d = ({key: t[task] for key, t in tree.items()} for tree in (params, grads, diagonals))
        alone, _ = rule.update(g, rule.init(own), own, KnownDiagonal(d))
        for key in params:
            torch.testing.assert_close(found[key][task], alone[key])


def one(rule, curvature, gradient=None):
    p = {"w": torch.ones(2, 2)}
    return rule.update({"w": torch.ones(2, 2) if gradient is None else gradient}, rule.init(p), p, curvature)


def test_what_is_missing_is_refused():
    with pytest.raises(
        ValueError, match=r"adahessian\(...\).update: this step needs curvature.*TapeCurvature"
    ):
        one(adahessian(), None)
    with pytest.raises(ValueError, match=r"adahessian\(...\).update: curvature.diagonal.* has no 'w'"):
        one(adahessian(), KnownDiagonal({}))
    with pytest.raises(TypeError, match=r"gradient of 'w' is RowSparse"):
        one(
            adahessian(),
            KnownDiagonal({"w": torch.ones(2, 2)}),
            RowSparse(torch.tensor([1]), torch.ones(1, 2), (2, 2)),
        )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lr": -1.0}, r"adahessian\(...\): lr must be at least 0, got -1"),
        ({"eps": -1.0}, "eps must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be below 1"),
        ({"hessian_power": -1.0}, "hessian_power must be at least 0"),
        ({"samples": 0}, "samples must be a whole number of at least 1, got 0"),
        ({"samples": 1.5}, "samples must be a whole number of at least 1, got 1.5"),
    ],
)
def test_bad_hyperparameters_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        adahessian(**keywords)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_power_is_the_same_differentiated_or_not(exponent):
    value = torch.tensor([0.0, 0.25, 4.0], dtype=torch.float64)
    with torch.no_grad():
        shortcut = power(value, exponent)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            tangent = forward_ad.unpack_dual(power(dual, exponent)).tangent
    assert torch.equal(shortcut, power(value, exponent))
    expected = torch.where(value == 0, 0.0, exponent * value ** (exponent - 1))
    torch.testing.assert_close(tangent, expected)
