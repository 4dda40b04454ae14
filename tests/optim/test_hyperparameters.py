"""Forms of hyperparameters: values, derivatives and errors."""

import pytest
import torch
from torch.utils import _pytree as pytree

import metagrad as mg
from metagrad.optim.rules import adagrad, adam, chain, clip_by_norm, muon, rmsprop, sgd, shampoo
from tests.optim.cases import CASES, scalar

CASE = CASES["sgd"]


def unrolled(lr):
    rule, params = sgd(lr=lr), CASE.params()

    def step(state, t):
        current, rule_state = state
        return rule.update(mg.grad(CASE.loss(current), current, create_graph=True), rule_state, current), None

    (last, _), _ = mg.unroll(step, (params, rule.init(params)), steps=3)
    return CASE.loss(last)


FORMS = {
    "per step, a tensor": lambda: torch.full((3,), 0.05, dtype=torch.float64, requires_grad=True),
    "per step, a list": lambda: [scalar(0.05) for _ in range(3)],
    "per parameter": lambda: {k: scalar(0.05) for k in CASE.shapes},
    "per element": lambda: {k: torch.full_like(p, 0.05).requires_grad_() for k, p in CASE.params().items()},
    "per step and parameter": lambda: [{k: scalar(0.05) for k in CASE.shapes} for _ in range(3)],
}


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_in_a_form_add_up_to_that_of_a_number(form):
    value, lr = FORMS[form](), scalar(0.05)
    result, expected = unrolled(value), unrolled(lr)
    torch.testing.assert_close(result, expected)
    grads = torch.autograd.grad(result, pytree.tree_leaves(value))
    torch.testing.assert_close(sum(g.sum() for g in grads), torch.autograd.grad(expected, lr)[0])


def test_values_per_element_apply_to_every_stacked_task():
    p = {"w": torch.ones(4, 2)}
    new, _ = sgd(lr={"w": torch.tensor([0.1, 0.2])}).update({"w": torch.ones(4, 2)}, sgd(lr=0.1).init(p), p)
    torch.testing.assert_close(new["w"], torch.tensor([0.9, 0.8]).expand(4, 2))


@pytest.mark.parametrize(
    ("make", "keywords", "error", "message"),
    [
        (sgd, {"lr": "0.1"}, TypeError, "lr must be a number, a tensor.*got str"),
        (sgd, {"lr": lambda t: 0.1}, TypeError, "got function.* rules.schedule for a function of the step"),
        (sgd, {"lr": torch.ones(2, 2)}, ValueError, r"scalar, or 1-d.*got shape \(2, 2\)"),
        (sgd, {"lr": {"w": "x"}}, TypeError, r"lr\['w'\]: expected int or float or Tensor, got str"),
        (sgd, {"lr": 0.1, "nesterov": True}, ValueError, "needs momentum, got 0"),
        (
            sgd,
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": True},
            ValueError,
            "dampening: expected 0, got 0.5",
        ),
        (adam, {"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be below 1, got 1.0"),
        (adam, {"betas": (0.9,)}, ValueError, r"betas must be as many as in \(0.9, 0.999\), got \(0.9,\)"),
        (adagrad, {"initial_accumulator_value": -1.0}, ValueError, "initial_accumulator_value must be at least"),
        (rmsprop, {"alpha": {"w": 1.5}}, ValueError, r"alpha\['w'\] must be below 1, got 1.5"),
        (rmsprop, {"alpha": [0.5, 1.5]}, ValueError, "alpha must be below 1, got 1.5"),
        (shampoo, {"decay": 1.5}, ValueError, "decay must be at most 1, which sums, got 1.5"),
        (shampoo, {"block_size": 0}, ValueError, r"block_size\): expected an int of 1 or more, got 0"),
        (shampoo, {"root_every": 0.5}, ValueError, r"root_every\): expected an int of 1 or more, got 0.5"),
        (muon, {"ns_steps": -1}, ValueError, r"ns_steps\): expected an int of 0 or more, got -1"),
        (muon, {"ns_coefficients": (1.0, 2.0)}, ValueError, r"expected three numbers, got \(1.0, 2.0\)"),
        (muon, {"adjust_lr_fn": "other"}, ValueError, "one of None, 'original', 'match_rms_adamw', got 'other'"),
    ],
)  # fmt: skip
def test_bad_hyperparameters_are_refused(make, keywords, error, message):
    with pytest.raises(error, match=message):
        make(**keywords)


@pytest.mark.parametrize("rule", [sgd(lr=0.1), adam(lr=0.1), chain(clip_by_norm(1.0), sgd(lr=0.1))])
def test_parameters_and_gradients_are_dicts(rule):
    p = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match=r"init\(params\): expected a dict by name, got 'list'"):
        rule.init([torch.ones(2)])
    for given in ((p, rule.init(p), [torch.ones(2)]), ((torch.ones(2),), rule.init(p), p)):
        with pytest.raises(TypeError, match=r"update\(grads, .*\): expected grads and params as dicts"):
            rule.update(*given)


@pytest.mark.parametrize(
    ("lr", "message"),
    [
        ([0.1, 0.1], "lr has one value for each of 2 steps, but this is step 2"),
        ({"w": 0.1, "typo": 0.1}, r"unknown: \['typo'\], missing: \['b', 'scale'\]"),
        ({"w": torch.ones(2, 3), "b": 0.1, "scale": 0.1}, r"lr\['w'\].*shape \(3, 2\), got \(2, 3\)"),
    ],
)
def test_values_that_do_not_fit_the_parameters_are_refused(lr, message):
    with pytest.raises(ValueError, match=message):
        unrolled(lr)
