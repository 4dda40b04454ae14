from __future__ import annotations

import pytest
import torch
from torch import nn

import metagrad as mg
from metagrad.sparse.tables.row_sparse import RowSparse
from tests.optim.cases import scalar

sgd = mg.optim.rules.sgd


def params():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in {"w": (3, 2), "b": (2,), "scale": ()}.items()
    }


def loss(p):
    return (torch.tanh(p["w"] + p["b"]) * p["scale"]).pow(2).sum() + p["b"].pow(4).sum()


def unrolled(p, steps=3, **hyper):
    rule = sgd(**hyper)

    def step(state, t):
        current, rule_state = state
        return rule.update(mg.grad(loss(current), current, create_graph=True), rule_state, current), None

    (last, _), _ = mg.unroll(step, (p, rule.init(p)), steps=steps)
    return loss(last)


FORMS = {
    "per step, a tensor": lambda: torch.full((3,), 0.05, dtype=torch.float64, requires_grad=True),
    "per step, a list": lambda: [scalar(0.05) for _ in range(3)],
    "per parameter": lambda: {k: scalar(0.05) for k in params()},
    "per element": lambda: {k: torch.full_like(p, 0.05).requires_grad_() for k, p in params().items()},
    "per step and parameter": lambda: [{k: scalar(0.05) for k in params()} for _ in range(3)],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_hyperparameter(form):
    value = FORMS[form]()
    result = unrolled(params(), lr=value)
    torch.testing.assert_close(result, unrolled(params(), lr=0.05))
    leaves = torch.utils._pytree.tree_leaves(value)
    grads = torch.autograd.grad(result, leaves)
    (total,) = torch.autograd.grad(unrolled(params(), lr=(lr := scalar(0.05))), lr)
    torch.testing.assert_close(sum(g.sum() for g in grads), total)


def test_values_per_element_apply_to_every_stacked_task():
    p = {"w": torch.ones(4, 2)}
    new, _ = sgd(lr={"w": torch.tensor([0.1, 0.2])}).update({"w": torch.ones(4, 2)}, sgd(lr=0.1).init(p), p)
    torch.testing.assert_close(new["w"], torch.tensor([0.9, 0.8]).expand(4, 2))


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"lr": -0.1}, ValueError, "lr must be at least 0, got -0.1"),
        ({"lr": float("nan")}, ValueError, "lr must be at least 0, got nan"),
        ({"lr": 0.1, "momentum": -1}, ValueError, "momentum must be at least 0"),
        ({"lr": "0.1"}, TypeError, "lr must be a number, a tensor.*got str"),
        ({"lr": torch.ones(2, 2)}, ValueError, r"scalar, or 1-d.*got shape \(2, 2\)"),
        ({"lr": {"w": "x"}}, TypeError, r"lr\['w'\] must be a number or a tensor, got str"),
        ({"lr": 0.1, "nesterov": True}, ValueError, "needs momentum, got 0"),
        (
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "nesterov": True},
            ValueError,
            "is not dampened, got dampening=0.5",
        ),
    ],
)
def test_bad_hyperparameters_are_refused(keywords, error, message):
    with pytest.raises(error, match=message):
        sgd(**keywords)


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
        unrolled(params(), lr=lr)


def test_parameters_of_a_module_as_hyperparameters():
    value = nn.Parameter(torch.tensor(0.1))
    assert sgd(lr=value).lr is value


@pytest.mark.parametrize("options", [{"lr": 0.5}, {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.1}])
@pytest.mark.parametrize("form", [float, torch.tensor])
def test_a_sparse_gradient_of_a_dense_table(options, form):
    table = torch.ones(4, 2, requires_grad=True)
    gradient = RowSparse(torch.tensor([1]), torch.ones(1, 2), (4, 2))
    rule = sgd(**{k: form(v) for k, v in options.items()})
    new, _ = rule.update({"table": gradient}, rule.init({"table": table}), {"table": table})
    table.grad = gradient.to_dense()
    torch.optim.SGD([table], **options).step()
    torch.testing.assert_close(new["table"], table)
