"""Newton steps that take products at some steps only, and conjugate gradients with a preconditioner."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

from metagrad.curvature.likelihoods.output_losses import Gaussian
from metagrad.optim.curvature import KnownDiagonal
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.newton.second_order import endings
from metagrad.optim.objective import TapeObjective
from metagrad.optim.rule import with_batch_ndim
from metagrad.optim.tape_curvature import WeightedLoss
from tests.marks import slow
from tests.optim.newton.problems import (
    I3,
    ONE,
    START,
    bfgs,
    close,
    least_squares,
    logistic,
    parameters,
    quartic_gradient,
    quartic_hessian,
    quartic_of,
    stepped,
)

F64 = torch.float64
FIT = torch.tensor([1.0, -0.5, 0.2], dtype=F64)
RULES = [newton_cg, gauss_newton, natural_gradient]
every = pytest.mark.parametrize("make", RULES)


class Counted:
    """An objective that counts the products it is asked for."""

    def __init__(self, objective):
        self.objective, self.count = objective, 0

    def __getattr__(self, name):
        if name.endswith("products"):
            self.count += 1
        return getattr(self.objective, name)


# Which steps take products


@every
def test_steps_without_products(make):
    rule = make(damping=0.3, curvature_every=3)
    loss = quartic_of if make is newton_cg else least_squares
    params = parameters(START if make is newton_cg else FIT)
    state = rule.init(params)
    for step in range(7):
        is_due = step % 3 == 0
        assert rule.multiplies(step) == is_due
        assert rule.needs_curvature(step)
        before = state
        objective = TapeObjective(loss, params)
        counted = Counted(objective)
        with torch.no_grad():
            new, state = rule.update(objective.grads, state, params, counted)
        params = {key: p.detach().requires_grad_() for key, p in new.items()}
        report = state.report
        assert (counted.count > 0) == is_due
        assert (int(report.products) > 0) == is_due
        assert (int(report.steps) > 0) == is_due
        assert (endings(report) == ["NONE"]) == (not is_due)
        assert math.isnan(report.ratio) == (not is_due)
        if not is_due:
            kept = state._replace(step=before.step, report=before.report)
            assert all(a is b for a, b in zip(kept, before, strict=True))


@every
def test_without_a_look_at_the_loss_steps_between_ask_for_nothing(make):
    rule, params = make(curvature_every=2, damping=0.3, adapt=False), parameters(0 * FIT)
    assert [rule.needs_curvature(step) for step in range(4)] == [True, False, True, False]
    params, state = stepped(rule, logistic, params, rule.init(params))
    objective = TapeObjective(logistic, params)
    new, _ = rule.update(objective.grads, state, params)
    assert float(objective.evaluate(new)) < float(objective.value)


@every
def test_with_products_at_every_step_nothing_is_stored(make):
    rule, params = make(damping=0.3), parameters(FIT)
    state = rule.init(params)
    assert state.moves is None
    assert state.changes is None
    _, state = stepped(rule, least_squares, params, state)
    assert state.moves is None
    assert state.changes is None
    assert rule.init({}).moves is None


# The directions between


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_directions_between_are_those_of_bfgs_on_the_last_model(kept):
    rule = newton_cg(lr=0.7, damping=0.4, adapt=False, curvature_every=3, pairs=kept)
    params, state = parameters(), rule.init(parameters())
    for step in range(6):
        w = params["w"].detach()
        params, state = stepped(rule, quartic_of, params, state)
        if step % 3 == 0:
            model = quartic_hessian(w) + 0.4 * I3
            moves, changes = state.moves["w"], state.changes["w"]
            assert moves.shape == changes.shape == (kept, 3)
            pairs = [(s, y) for s, y in zip(moves, changes, strict=True) if s.any()]
            assert len(pairs) == min(kept, 3)
            for s, y in pairs:
                close(y, model @ s)
            close(pairs[0][0], -quartic_gradient(w))
        else:
            close(params["w"], w - 0.7 * bfgs(pairs) @ quartic_gradient(w))


def test_with_all_pairs_the_direction_is_newtons_on_the_last_model():
    """Conjugate directions that span everything are the inverse, of a quadratic that of the next step too."""
    rule, params = newton_cg(lr=0.5, damping=0.1, adapt=False, curvature_every=2), parameters()
    A, b = quartic_hessian(torch.zeros(3, dtype=F64)), torch.tensor([1.0, -2.0, 0.7], dtype=F64)

    def quadratic(p):
        return p["w"] @ A @ p["w"] / 2 - b @ p["w"]

    state, w = rule.init(params), params["w"].detach()
    for _ in range(4):
        params, state = stepped(rule, quadratic, params, state)
        w = w - 0.5 * torch.linalg.solve(A + 0.1 * I3, A @ w - b)
        close(params["w"], w)


@pytest.mark.parametrize("make", [newton_cg, gauss_newton])
def test_lengths_between_are_looked_for_and_damping_stays(make):
    """A step that would climb, since the curvature has grown, is halved; also where products would refuse it."""

    def walls(params):
        w = params["w"]
        r = torch.cat([w, 30 * torch.relu(w[:1] - 1) ** 2])
        return r.pow(2).sum() / 2 - 3 * w[0], [WeightedLoss(Gaussian(r, ONE, ONE), ONE)]

    rule = make(curvature_every=2, damping=0.01)
    params = parameters(torch.tensor([0.0, 1.0], dtype=F64))
    # The first step is short, for the second to begin with the curvature of a place before the wall.
    params, state = stepped(make(lr=0.3, curvature_every=2, damping=0.01), walls, params, rule.init(params))
    value = float(walls(params)[0].detach())
    g = TapeObjective(walls, params).grads["w"].detach()
    d = rule.recalled(
        SimpleNamespace(g=g[None]),  # type: ignore[arg-type]
        state,
    )[0]
    assert float(walls({"w": params["w"].detach() + d})[0]) > value + 1e-4 * float(g @ d)
    new, after = stepped(rule, walls, params, state)
    length = float(after.report.length)
    assert length in {2.0**-k for k in range(1, 10)}
    close(new["w"], params["w"] + length * d)
    assert float(walls(new)[0].detach()) <= value + 1e-4 * length * float(g @ d)
    assert float(walls({"w": params["w"].detach() + 2 * length * d})[0]) > value + 2e-4 * length * float(
        g @ d
    )
    assert torch.equal(after.factor, state.factor)


@pytest.mark.parametrize("bound", [None, 1e-4])
def test_the_bound_of_natural_gradient_between(bound):
    rule = natural_gradient(lr=0.5, damping=0.05, max_divergence=bound, curvature_every=2, adapt=False)
    params = parameters(torch.zeros(3, dtype=F64))
    state = rule.init(params)
    params, state = stepped(rule, logistic, params, state)
    g = TapeObjective(logistic, params).grads["w"].detach()
    d = -bfgs(list(zip(state.moves["w"][-3:], state.changes["w"][-3:], strict=True))) @ g
    length = 0.5 if bound is None else math.sqrt(2 * bound / float(-(g @ d)))
    assert bound is None or length < 0.5
    new, state = stepped(rule, logistic, params, state)
    close(new["w"], params["w"] + length * d)
    assert float(state.report.length) == pytest.approx(length)


def test_before_any_pair_the_direction_is_that_of_the_gradient():
    rule, params = newton_cg(adapt=False, curvature_every=2), parameters(torch.zeros(2, dtype=F64))
    state = rule.init(params)._replace(step=1)
    new, _ = rule.update({"w": torch.tensor([0.5, -0.25], dtype=F64)}, state, params)
    assert new["w"].tolist() == [-0.5, 0.25]


def test_a_solve_without_a_pair_leaves_those_before():
    """At a saddle the first direction may have negative curvature already."""
    rule, params = newton_cg(adapt=False, curvature_every=2), parameters(torch.tensor([2.0], dtype=F64))
    state = rule.init(params)
    params, state = stepped(rule, lambda p: (p["w"] ** 2).sum(), params, state)
    assert state.moves["w"].any()
    _, after = stepped(
        rule,
        lambda p: (p["w"] - p["w"] ** 2).sum(),
        parameters(torch.tensor([1.0], dtype=F64)),
        state._replace(step=2),
    )
    assert endings(after.report) == ["NEGATIVE_CURVATURE"]
    assert torch.equal(after.moves["w"], state.moves["w"])
    assert torch.equal(after.changes["w"], state.changes["w"])


@every
@pytest.mark.parametrize("curvature_every", [2, 5])
def test_steps_between_help(make, curvature_every):
    """Between two solves the loss falls further, for a gradient each."""
    rule = make(lr=1.0, damping=0.01, curvature_every=curvature_every, adapt=False)
    params = parameters(torch.zeros(3, dtype=F64))
    state, losses = rule.init(params), []
    for _ in range(2 * curvature_every + 1):
        params, state = stepped(rule, logistic, params, state)
        losses.append(float(logistic(params)[0].detach()))
    assert all(after <= before for before, after in itertools.pairwise(losses))
    assert losses[curvature_every - 1] < losses[0]


# The preconditioner


def ill_scaled(samples=200, n=40, seed=0):
    """Linear least squares, columns from 1 to 1e-4, the Gauss-Newton matrix so of condition 1e8 or so."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, n, generator=generator, dtype=F64) * torch.logspace(0, -4, n, dtype=F64)
    goal = torch.randn(n, generator=generator, dtype=F64) / torch.logspace(0, -4, n, dtype=F64)

    def loss(params):
        r = x @ (params["w"] - goal)
        return r.pow(2).sum() / 2, [WeightedLoss(Gaussian(r, ONE, ONE), ONE)]

    return loss, x.T @ x, goal


def steps_of(rule, loss, n, seed=3):
    params = parameters(torch.zeros(n, dtype=F64))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        new, state = stepped(rule, loss, params, rule.init(params))
    return new["w"].detach(), int(state.report.steps), int(state.report.products), endings(state.report)


@every
@pytest.mark.parametrize(("exponent", "part"), [(0.75, 1 / 3), slow(1.0, 1 / 4)])
def test_ill_scaled_least_squares_take_a_part_of_the_steps(make, exponent, part):
    """Without: 322. Gauss-Newton: 58 and 27; Hutchinson's probes also see what is beside the diagonal, 94 and 69."""
    loss, matrix, goal = ill_scaled()
    values = torch.linalg.eigvalsh(matrix)
    assert float(values[-1] / values[0]) > 1e7
    options = {"damping": 0.0, "rtol": 1e-10, "progress": None, "max_steps": 1000, "adapt": False}
    _, plain, products, ending = steps_of(make(**options), loss, 40)
    assert ending == ["CONVERGED"]
    assert products == plain > 250
    rule = make(preconditioner="diagonal", exponent=exponent, samples=20, **options)
    w, steps, products, ending = steps_of(rule, loss, 40)
    assert ending == ["CONVERGED"]
    assert steps < part * plain
    assert products == steps + (20 if make is newton_cg else 0)
    torch.testing.assert_close(w, goal, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_diagonal_hessian_is_solved_in_one_step(dtype):
    """Its probes are exact, and with the exponent 1 the preconditioned matrix is the identity."""
    scales = torch.logspace(0, -8, 20, dtype=dtype)

    def loss(params):
        return (scales * (params["w"] - 1) ** 2).sum() / 2

    params = parameters(torch.zeros(20, dtype=dtype))
    options = {"adapt": False, "progress": None}
    rule = newton_cg(preconditioner="diagonal", exponent=1.0, samples=1, **options)
    new, state = stepped(rule, loss, params, rule.init(params))
    assert int(state.report.steps) == 1
    assert int(state.report.products) == 2
    torch.testing.assert_close(new["w"].detach(), torch.ones(20, dtype=dtype), rtol=1e-4, atol=0)
    new, state = stepped(newton_cg(**options), loss, params, rule.init(params))
    assert int(state.report.steps) > 10


class Known(KnownDiagonal):
    """A matrix, and what passes for an estimate of its diagonal."""

    def __init__(self, matrix, diagonals):
        super().__init__(diagonals)
        self.matrix, self.requests = matrix, []

    def products(self, v):
        return {"w": self.matrix @ v["w"]}

    gauss_newton_products = fisher_products = products

    def diagonal(self, request):
        self.requests.append(request)
        return super().diagonal(request)


@every
@pytest.mark.parametrize("max_steps", [1, 2])
def test_the_preconditioner_is_that_of_martens(make, max_steps):
    """(|D| + damping)^exponent: iterates are those for M^-1/2 A M^-1/2, here the first two written out."""
    A, D, g = quartic_hessian(START), torch.tensor([0.5, -3.0, 7.0], dtype=F64), quartic_gradient(START)
    rule = make(
        preconditioner="diagonal", damping=0.2, exponent=0.6, samples=3, max_steps=max_steps, adapt=False
    )
    params, known = parameters(), Known(A, {"w": D})
    found = rule.update({"w": g}, rule.init(params), params, known)[0]["w"] - START
    inverse, damped = (D.abs() + 0.2) ** -0.6, A + 0.2 * I3
    p = -inverse * g
    x = (g @ (inverse * g)) / (p @ damped @ p) * p
    if max_steps == 2:
        basis = torch.stack([p, inverse * (damped @ p)], 1)
        x = -basis @ torch.linalg.solve(basis.T @ damped @ basis, basis.T @ g)
    close(found, x)
    (request,) = known.requests
    assert request[:2] == ("hessian" if make is newton_cg else "gauss_newton", 3)


@pytest.mark.parametrize("diagonal", [[0.0, 0.0, 0.0], [0.0, 2.0, 1.0]])
def test_a_diagonal_of_zeros_without_damping(diagonal):
    A, g = quartic_hessian(START), quartic_gradient(START)
    rule = newton_cg(preconditioner="diagonal", adapt=False, progress=None)
    params = parameters()
    known = Known(A, {"w": torch.tensor(diagonal, dtype=F64)})
    found = rule.update({"w": g}, rule.init(params), params, known)[0]["w"]
    torch.testing.assert_close(found.detach(), START - torch.linalg.solve(A, g), rtol=1e-6, atol=1e-8)


def test_an_estimate_that_is_not_finite_moves_nothing_and_is_told():
    params = parameters()
    rule = newton_cg(preconditioner="diagonal", adapt=False)
    known = Known(I3, {"w": torch.tensor([1.0, torch.nan, 1.0], dtype=F64)})
    new, state = rule.update({"w": torch.ones(3, dtype=F64)}, rule.init(params), params, known)
    assert endings(state.report) == ["NON_FINITE"]
    assert torch.equal(new["w"], START)


def test_every_task_has_a_preconditioner_of_its_own():
    """Two tasks with their scales in opposite order: one step each, which no common diagonal gives."""
    scales = torch.logspace(0, -6, 10, dtype=F64)
    scales = torch.stack([scales, scales.flip(0)])

    def loss(params):
        return (scales * (params["w"] - 1) ** 2).sum(1) / 2

    params = parameters(torch.zeros(2, 10, dtype=F64))
    rule = newton_cg(preconditioner="diagonal", exponent=1.0, adapt=False, progress=None)
    rule = with_batch_ndim(rule, 1)
    new, state = stepped(rule, loss, params, rule.init(params))
    assert state.report.steps.tolist() == [1, 1]
    torch.testing.assert_close(new["w"].detach(), torch.ones(2, 10, dtype=F64), rtol=1e-6, atol=0)


@every
def test_stacked_tasks_with_a_known_diagonal_are_tasks_alone(make):
    class Scaled(TapeObjective):
        def diagonal(self, request):
            return {"w": 1 + 3 * self._params["w"] ** 2}

    def moved(rule, params, state):
        objective = Scaled(least_squares, params)
        with torch.no_grad():
            new, state = rule.update(objective.grads, state, params, objective)
        return {"w": new["w"].detach().requires_grad_()}, state

    rule = make(damping=0.3, curvature_every=2, pairs=2, preconditioner="diagonal", max_steps=2)
    stacked = with_batch_ndim(rule, 1)
    together = parameters(
        FIT + 0.3 * torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    )
    alone = [parameters(w.detach()) for w in together["w"]]
    state, states = stacked.init(together), [rule.init(params) for params in alone]
    for _ in range(4):
        together, state = moved(stacked, together, state)
        for index, params in enumerate(alone):
            alone[index], states[index] = moved(rule, params, states[index])
        close(together["w"], torch.stack([params["w"] for params in alone]), rtol=1e-9)
    assert state.moves["w"].shape == (4, 2, 3)


# In inner loops


OPTIONS = {
    "every": {"curvature_every": 2, "pairs": 4},
    "preconditioned": {"preconditioner": "diagonal", "samples": 2},
    "both": {"curvature_every": 2, "pairs": 2, "preconditioner": "diagonal", "max_steps": 4},
}
in_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every
@in_options
@pytest.mark.parametrize("tasks", [(), (2,)])
def test_shapes_of_states_are_fixed(make, options, tasks):
    rule = with_batch_ndim(make(damping=0.3, **options), len(tasks))
    params = parameters(FIT.expand(*tasks, 3))
    state = rule.init(params)
    first, structure = pytree.tree_flatten(state)
    for _ in range(3):
        params, state = stepped(rule, least_squares, params, state)
        leaves, other = pytree.tree_flatten(state)
        assert other == structure
        for a, b in zip(first, leaves, strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_derivatives_between_go_through_the_pairs():
    """Without them the second step would be a function of the gradient alone."""
    rule = newton_cg(adapt=False, damping=0.3, curvature_every=2)
    w = parameters()["w"]
    objective = TapeObjective(quartic_of, {"w": w}, create_graph=True)
    _, state = rule.update(objective.grads, rule.init({"w": w}), {"w": w}, objective)
    assert state.moves["w"].requires_grad
    assert state.changes["w"].requires_grad
    fixed = torch.ones(3, dtype=F64)
    new, _ = rule.update({"w": fixed}, state, {"w": fixed.clone()})
    (found,) = torch.autograd.grad((new["w"] ** 3).sum(), w)
    assert found.abs().min() > 1e-6


# Errors


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"curvature_every": 0}, r": curvature_every must be a whole number of at least 1, got 0"),
        ({"curvature_every": 1.5}, "curvature_every must be a whole number"),
        ({"pairs": 0}, r": pairs must be a whole number of at least 1, got 0"),
        ({"samples": True}, r": samples must be a whole number of at least 1, got True"),
        ({"preconditioner": "jacobi"}, r""": preconditioner must be "diagonal" or None, got 'jacobi'"""),
        ({"exponent": -0.5}, r": exponent must be at least 0, got -0.5"),
        ({"exponent": {"w": 1.0}}, r": exponent is one number for all parameters"),
    ],
)
def test_hyperparameters_out_of_their_range(make, options, match):
    name = make.call.removesuffix("(...)")
    with pytest.raises((TypeError, ValueError), match=rf"{name}\(...\).*{match}"):
        make(**options)


@pytest.mark.parametrize("make", [newton_cg, gauss_newton])
def test_a_step_between_that_cannot_look_at_the_loss(make):
    rule, params = make(curvature_every=2), {"w": torch.zeros(2)}
    state = rule.init(params)._replace(step=1)
    with pytest.raises(
        ValueError,
        match=r"update: the loss is needed at other parameters, and curvature is None.*adapt=False",
    ):
        rule.update({"w": torch.ones(2)}, state, params)
    with pytest.raises(TypeError, match=r"KnownDiagonal has no evaluate\(params\).*adapt=False"):
        rule.update({"w": torch.ones(2)}, state, params, KnownDiagonal({}))


def test_a_curvature_without_an_estimate():
    params = {"w": torch.zeros(2), "b": torch.zeros(1)}
    grads = {"w": torch.ones(2), "b": torch.ones(1)}
    rule = natural_gradient(preconditioner="diagonal", adapt=False)
    bare = SimpleNamespace(fisher_products=lambda v: v)
    with pytest.raises(
        TypeError, match=r"SimpleNamespace has no diagonal\(request\). Set preconditioner=None"
    ):
        rule.update(grads, rule.init(params), params, bare)
    half = SimpleNamespace(fisher_products=lambda v: v, diagonal=lambda request: {"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"an estimate for every parameter, and .* has none of \['b'\]"):
        rule.update(grads, rule.init(params), params, half)


def test_a_state_of_other_pairs():
    params = parameters()
    state = newton_cg(curvature_every=2, pairs=3).init(params)
    with pytest.raises(ValueError, match=r"the state has 3 pairs, and the rule has pairs=4"):
        stepped(newton_cg(curvature_every=2, pairs=4), quartic_of, params, state)


def test_no_parameters_no_step_between():
    rule = gauss_newton(curvature_every=2)
    params, state = rule.update({}, rule.init({}), {})
    assert rule.update({}, state, params)[1].step == 2
