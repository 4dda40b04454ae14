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
from tests.marks import slow
from tests.optim.cases import scalar
from tests.optim.newton.problems import least_squares, quartic, quartic_of, stepped


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
# Of what other cases have one by one.
COMBINED = {
    "newton_cg begins to damp",
    "newton_cg every second, truncated",
    "newton_cg every second, overshooting",
    "natural_gradient every second",
    "natural_gradient preconditioned",
    "cubic_newton truncated",
    "trust_region_newton indefinite",
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


@pytest.mark.parametrize(
    "case",
    [
        slow(case, id=name) if name in COMBINED else pytest.param(case, id=name)
        for name, case in CASES.items()
    ],
)
def test_two_steps_pass_gradcheck_in_parameters_and_hyperparameters(case):
    make, hyper, options, loss = case
    w = (FIT if loss is least_squares else START).clone().requires_grad_()

    def fn(w, hyper):
        return adapted(make(**hyper, **options), loss, w)

    assert joint_gradcheck(
        fn, (w, {key: scalar(value) for key, value in hyper.items()}), order=2, directions=1
    )


# Every rule, with what a state can hold besides, and every way in which a step ends early or is damped.
KEPT = {
    "newton_cg warm", "newton_cg indefinite", "newton_cg every second, overshooting", "newton_cg preconditioned",
    "gauss_newton every second, preconditioned", "natural_gradient bounded", "trust_region_newton indefinite",
    "trust_region_newton shrinks", "cubic_newton indefinite", "lbfgs wolfe",
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case if name in KEPT else slow(case) for name, case in CASES.items()], ids=CASES
)
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
