"""Second-order rules as inner optimizers: derivatives, memory modes, and tasks that are stacked."""

from __future__ import annotations

import pytest
import torch

import metagrad as mg
from metagrad.optim.newton.cubic_newton import cubic_newton
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.lbfgs import lbfgs
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.newton.trust_region_newton import trust_region_newton
from metagrad.optim.objective import TapeObjective
from metagrad.optim.rule import with_batch_ndim
from tests.joint import joint_gradcheck
from tests.optim.newton.problems import least_squares, quartic, stepped


def scalar(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def quartic_of(params):
    return quartic(params["w"])


def indefinite(params):
    return quartic(params["w"]) - 2 * params["w"].pow(2).sum(-1)


def overshooting(params):
    """Newton's step from here is too long, as that of log cosh is beyond 1.09."""
    w = params["w"]
    return torch.log(torch.cosh(3 * w)).sum(-1) + 0.1 * (w[..., 0] * w[..., 1])


START = torch.tensor([0.4, -0.3, 0.2], dtype=torch.float64)
FIT = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
# Probes and labels that are drawn for all tasks together are not those of one task: "preconditioned" is left out of
# what compares the two, for which test_damped.py has a diagonal that is known.
CASES = {
    "newton_cg": (newton_cg, {"lr": 0.8, "damping": 0.3}, {}, quartic_of),
    "newton_cg fixed": (newton_cg, {"lr": 0.8, "damping": 0.3}, {"adapt": False}, quartic_of),
    "newton_cg truncated": (newton_cg, {"damping": 0.3}, {"adapt": False, "max_steps": 2}, quartic_of),
    "newton_cg warm": (newton_cg, {"damping": 0.3, "warm_start": 0.9}, {"max_steps": 1}, quartic_of),
    "newton_cg indefinite": (newton_cg, {"lr": 0.7, "damping": 0.1}, {}, indefinite),
    "newton_cg begins to damp": (newton_cg, {"lr": 0.7}, {}, overshooting),
    "newton_cg every second": (newton_cg, {"lr": 0.8, "damping": 0.3}, {"curvature_every": 2}, quartic_of),
    "newton_cg every second, truncated": (
        newton_cg,
        {"damping": 0.3},
        {"curvature_every": 2, "pairs": 1, "max_steps": 2, "adapt": False},
        quartic_of,
    ),
    "newton_cg every second, overshooting": (newton_cg, {"lr": 0.7}, {"curvature_every": 2}, overshooting),
    "newton_cg preconditioned": (
        newton_cg,
        {"damping": 0.3, "exponent": 0.75},
        {"preconditioner": "diagonal", "samples": 2, "max_steps": 2},
        quartic_of,
    ),
    "gauss_newton every second, preconditioned": (
        gauss_newton,
        {"lr": 0.8, "damping": 0.1, "exponent": 0.6},
        {"curvature_every": 2, "pairs": 2, "preconditioner": "diagonal", "samples": 2, "max_steps": 2},
        least_squares,
    ),
    "natural_gradient every second": (
        natural_gradient,
        {"lr": 0.5, "damping": 0.1, "max_divergence": 0.05},
        {"curvature_every": 2},
        least_squares,
    ),
    "natural_gradient preconditioned": (
        natural_gradient,
        {"lr": 0.5, "damping": 0.1, "exponent": 1.0},
        {"preconditioner": "diagonal", "samples": 2, "max_steps": 2},
        least_squares,
    ),
    "gauss_newton": (gauss_newton, {"lr": 0.8, "damping": 0.1}, {}, least_squares),
    "natural_gradient": (natural_gradient, {"lr": 0.8, "damping": 0.1}, {}, least_squares),
    "natural_gradient bounded": (
        natural_gradient,
        {"lr": 5.0, "damping": 0.1, "max_divergence": 0.05},
        {},
        least_squares,
    ),
    "trust_region_newton": (trust_region_newton, {"radius": 0.2}, {}, quartic_of),
    "trust_region_newton, steihaug": (
        trust_region_newton,
        {"radius": 0.2},
        {"boundary_steps": 0},
        quartic_of,
    ),
    "trust_region_newton indefinite": (trust_region_newton, {"radius": 0.3}, {}, indefinite),
    "trust_region_newton shrinks": (trust_region_newton, {"radius": 5.0}, {}, overshooting),
    "cubic_newton": (cubic_newton, {"lr": 0.8, "cubic": 2.0}, {}, quartic_of),
    "cubic_newton indefinite": (cubic_newton, {"cubic": 1.0}, {}, indefinite),
    "cubic_newton truncated": (cubic_newton, {"cubic": 1.0}, {"max_steps": 2}, quartic_of),
    "lbfgs": (lbfgs, {"lr": 0.9}, {"history_size": 2}, quartic_of),
    "lbfgs wolfe": (lbfgs, {"lr": 0.9}, {"line_search_fn": "strong_wolfe"}, quartic_of),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def adapted(rule, loss, w, steps=2, memory="full"):
    """Unroll an inner loop by hand, as MAML does; random numbers are the same each time."""

    def step(state, t, rule):
        params, rule_state = state
        objective = TapeObjective(loss, params, create_graph=True)
        return rule.update(objective.grads, rule_state, params, objective), objective.value

    params = {"w": w}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        (params, _), _ = mg.unroll(step, (params, rule.init(params)), rule, steps=steps, memory=memory)
    return params["w"]


@every
def test_two_steps_pass_gradcheck_in_parameters_and_hyperparameters(case):
    make, hyper, options, loss = case
    w = (FIT if loss is least_squares else START).clone().requires_grad_()

    def fn(w, hyper):
        return adapted(make(**hyper, **options), loss, w)

    assert joint_gradcheck(
        fn, (w, {key: scalar(value) for key, value in hyper.items()}), order=2, directions=1
    )


@every
def test_memory_modes_agree(case):
    make, hyper, options, loss = case
    results = []
    for memory in ("full", "step"):
        w = (FIT if loss is least_squares else START).clone().requires_grad_()
        values = {key: scalar(value) for key, value in hyper.items()}
        result = adapted(make(**values, **options), loss, w, 4, memory)
        results.append(mg.grad((result**3).sum(), [w, *values.values()]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-12)


ALONE = {name: case for name, case in CASES.items() if "preconditioned" not in name}


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE)
def test_stacked_tasks_are_tasks_alone(case):
    make, hyper, options, loss = case
    generator = torch.Generator().manual_seed(0)
    first = FIT if loss is least_squares else START
    starts = first + 0.3 * torch.randn(4, 3, generator=generator, dtype=torch.float64)
    rule = make(**hyper, **options)
    stacked, together = with_batch_ndim(rule, 1), {"w": starts.clone().requires_grad_()}
    alone = [{"w": start.clone().requires_grad_()} for start in starts]
    state, states = stacked.init(together), [rule.init(params) for params in alone]
    for _ in range(4):
        together, state = stepped(stacked, loss, together, state)
        for index, params in enumerate(alone):
            alone[index], states[index] = stepped(rule, loss, params, states[index])
        expected = torch.stack([params["w"] for params in alone]).detach()
        torch.testing.assert_close(together["w"].detach(), expected, rtol=1e-9, atol=1e-12)
    assert state.report.length.shape == (4,)
    assert states[0].report.length.shape == ()


BY_PARAMETER = {
    "newton_cg": (newton_cg, ("lr", "damping", "weight_decay"), quartic_of),
    "gauss_newton": (gauss_newton, ("lr", "damping", "weight_decay"), least_squares),
    "natural_gradient": (natural_gradient, ("lr", "damping", "weight_decay"), least_squares),
    "trust_region_newton": (trust_region_newton, ("lr", "weight_decay"), quartic_of),
    "cubic_newton": (cubic_newton, ("lr", "weight_decay"), quartic_of),
    "lbfgs": (lbfgs, ("lr", "weight_decay"), quartic_of),
}
VALUES = {"lr": [0.8, 0.5, 0.9], "damping": [0.5, 1.0, 0.3], "weight_decay": [0.1, 0.2, 0.05]}


@pytest.mark.parametrize(("make", "names", "loss"), BY_PARAMETER.values(), ids=BY_PARAMETER)
def test_hyperparameters_by_parameter_are_differentiated_and_stack(make, names, loss):
    """One value for each element, the same for all tasks."""
    first = FIT if loss is least_squares else START

    def rule_of(*values):
        return make(**{name: {"w": value} for name, value in zip(names, values, strict=True)})

    def fn(w, *values):
        return adapted(rule_of(*values), loss, w)

    values = [scalar(VALUES[name]) for name in names]
    assert joint_gradcheck(fn, (first.clone().requires_grad_(), *values), order=1)
    rule = rule_of(*(value.detach() for value in values))
    starts = torch.stack([first, 1.2 * first])
    stacked, together = with_batch_ndim(rule, 1), {"w": starts.clone().requires_grad_()}
    found, _ = stepped(stacked, loss, together, stacked.init(together))
    for index, start in enumerate(starts):
        alone, _ = stepped(rule, loss, {"w": start.clone().requires_grad_()}, rule.init({"w": start}))
        torch.testing.assert_close(found["w"][index], alone["w"], rtol=1e-9, atol=1e-12)


def sinusoids(num_tasks, shots=10, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    amplitude, phase = 0.1 + 4.9 * draw(num_tasks, 1, 1), 3.14159 * draw(num_tasks, 1, 1)
    x = 10 * draw(num_tasks, 2 * shots, 1) - 5
    return x, amplitude * torch.sin(x - phase)


def network(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w1": (1, 6), "b1": (6,), "w2": (6, 6), "b2": (6,), "w3": (6, 1), "b3": (1,)}
    return {
        name: (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for name, shape in shapes.items()
    }


def predict(p, x):
    """An MLP for each task."""
    h = torch.tanh(x @ p["w1"] + p["b1"][:, None])
    return torch.tanh(h @ p["w2"] + p["b2"][:, None]) @ p["w3"] + p["b3"][:, None]


def meta_loss(params, rule, data, memory="full"):
    """MAML's objective, with tasks stacked: adapt on the first half of the shots, test on the second."""
    (x, y), shots = data, data[0].shape[1] // 2

    def support(p):
        return (predict(p, x[:, :shots]) - y[:, :shots]).pow(2).mean((1, 2))

    def step(state, t, rule):
        current, rule_state = state
        objective = TapeObjective(support, current, create_graph=True)
        return rule.update(objective.grads, rule_state, current, objective), objective.value

    stacked = {name: p.expand(len(x), *p.shape) for name, p in params.items()}
    state = (stacked, rule.init(stacked))
    (adapted, _), _ = mg.unroll(step, state, rule, steps=2, memory=memory)
    return (predict(adapted, x[:, shots:]) - y[:, shots:]).pow(2).mean()


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.parametrize("adapt", [False, True])
def test_meta_gradients_through_newton_cg_on_sinusoids_are_finite_differences(adapt, memory):
    data, params = sinusoids(3), network()
    # Enough for the Hessians of all tasks to be positive definite: a search direction of no curvature, and a
    # length that a line search halves, are where the step jumps, which no finite difference may straddle.
    hyper = {"lr": scalar(0.5), "damping": scalar(100.0)}

    def objective(params, hyper, memory="full"):
        rule = with_batch_ndim(newton_cg(**hyper, adapt=adapt, max_steps=6), 1)
        return meta_loss(params, rule, data, memory)

    leaves = {**params, **hyper}
    found = mg.grad(objective(params, hyper, memory), leaves)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        v = {k: torch.randn(p.shape, generator=generator, dtype=torch.float64) for k, p in leaves.items()}

        def moved(size, v=v):
            at = {k: (p + size * v[k]).detach().requires_grad_() for k, p in leaves.items()}
            return objective({k: at[k] for k in params}, {k: at[k] for k in hyper}).detach()

        eps = 1e-6
        difference = (8 * (moved(eps) - moved(-eps)) - (moved(2 * eps) - moved(-2 * eps))) / (12 * eps)
        exact = sum((found[k] * v[k]).sum() for k in leaves)
        torch.testing.assert_close(exact, difference, rtol=1e-6, atol=1e-9)


def test_meta_training_through_newton_cg_learns():
    params, lr, damping = network(), scalar(0.5), scalar(1.0)
    outer = torch.optim.Adam([*params.values(), lr, damping], lr=1e-2)
    losses = []
    for _ in range(40):
        rule = with_batch_ndim(newton_cg(lr, damping=damping, adapt=False, max_steps=5), 1)
        loss = meta_loss(params, rule, sinusoids(5))
        outer.zero_grad()
        loss.backward()
        outer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
