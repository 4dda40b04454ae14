"""The adaptive rules, held to one table of cases: adding a rule means adding rows."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import metagrad as mg
from metagrad.optim.rules.adagrad import adagrad
from metagrad.optim.rules.adam import adam
from metagrad.optim.rules.rmsprop import rmsprop
from metagrad.optim.rules.rule import root
from metagrad.optim.rules.sgd import sgd
from metagrad.sparse.rows.row_sparse import RowSparse


def betas(first, second):
    return {"betas": (first, second)}


# Rule, its counterpart in torch.optim, and the options of both.
CASES = [
    (adam, Adam, {}),
    (adam, Adam, {"eps": 1e-3, **betas(0.5, 0.6)}),
    (adam, Adam, {"weight_decay": 0.1}),
    (adam, AdamW, {"weight_decay": 0.1, "decoupled": True}),
    (adagrad, Adagrad, {}),
    (adagrad, Adagrad, {"lr_decay": 0.2, "eps": 1e-3}),
    (adagrad, Adagrad, {"weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    (rmsprop, RMSprop, {}),
    (rmsprop, RMSprop, {"alpha": 0.5, "eps": 1e-3, "weight_decay": 0.1}),
    (rmsprop, RMSprop, {"momentum": 0.9}),
    (rmsprop, RMSprop, {"centered": True}),
    (rmsprop, RMSprop, {"centered": True, "momentum": 0.5, "weight_decay": 0.1}),
]
over_cases = pytest.mark.parametrize(
    ("make", "counterpart", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)


def params(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for name, shape in {"w": (3, 2), "b": (2,), "scale": ()}.items()
    }


def loss(p):
    return (torch.tanh(p["w"] + p["b"]) * p["scale"]).pow(2).sum() + p["b"].pow(4).sum()


def scalar(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def unrolled(p, rule, steps=3, memory="full"):
    def step(state, t):
        current, rule_state = state
        return rule.update(mg.grad(loss(current), current, create_graph=True), rule_state, current), None

    (last, _), _ = mg.unroll(step, (p, rule.init(p)), steps=steps, memory=memory)
    return loss(last)


def as_tensors(options):
    """Make every number a tensor that requires grad, but what is a number by contract."""
    fixed = ("initial_accumulator_value",)
    made = {k: scalar(v) if type(v) is float and k not in fixed else v for k, v in options.items()}
    if "betas" in made:
        made["betas"] = tuple(map(scalar, made["betas"]))
    return made


@over_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_step_for_step(make, counterpart, options, dtype):
    ours, theirs = params(dtype), params(dtype)
    rule = make(lr=0.05, **options)
    known = {k: v for k, v in options.items() if k != "decoupled"}
    optimizer = counterpart(theirs.values(), lr=0.05, foreach=False, **known)
    state = rule.init(ours)
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    for step in range(8):
        ours, state = rule.update(mg.grad(loss(ours), ours), state, ours)
        ours = {k: p.detach().requires_grad_() for k, p in ours.items()}
        optimizer.zero_grad()
        loss(theirs).backward()
        optimizer.step()
        assert state.step == step + 1
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], **tolerance)


@over_cases
def test_unrolled_steps_pass_gradcheck_in_parameters_and_hyperparameters(make, counterpart, options):
    fixed = params()
    hyper = as_tensors({"lr": 0.05, "eps": 1e-2, **options})
    assert mg.gradcheck(
        lambda w, hyper: unrolled({**fixed, "w": w}, make(**hyper), 2), (params()["w"], hyper), order=2
    )


@over_cases
def test_a_tensor_gives_what_the_number_gives_and_memory_changes_nothing(make, counterpart, options):
    p = params()
    results = [
        unrolled(p, make(lr=0.05, **options)),
        unrolled(p, make(**as_tensors({"lr": 0.05, **options}))),
        unrolled(p, make(lr=0.05, **options), memory="step"),
    ]
    grads = [mg.grad(result, p) for result in results]
    for result, gradient in zip(results[1:], grads[1:], strict=True):
        torch.testing.assert_close(result, results[0])
        torch.testing.assert_close(gradient, grads[0])


@over_cases
def test_a_gradient_that_is_exactly_zero_gives_no_nan_at_any_order(make, counterpart, options):
    """higher#125: the derivative of the root at zero made every meta-gradient NaN."""
    p = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)}
    rule, hyper = make(**(h := as_tensors({"lr": 0.05, **options}))), h["lr"]
    state, current = rule.init(p), p
    for _ in range(2):
        grads = mg.grad((current["w"] * torch.tensor([0.0, 1.0])).pow(2).sum(), current, create_graph=True)
        current, state = rule.update(grads, state, current)
    level = current["w"].pow(2).sum()
    for _ in range(3):
        grads = mg.grad(level, (p["w"], hyper), create_graph=True, materialize_grads=True)
        assert all(g.isfinite().all() for g in grads)
        level = sum((g**3).sum() for g in grads)


def test_root_has_zero_derivatives_at_zero_and_the_roots_elsewhere():
    x = torch.tensor([0.0, 4.0, 9.0], dtype=torch.float64, requires_grad=True)
    y = root(x)
    assert y.tolist() == [0, 2, 3]
    first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    assert first.tolist() == [0, 1 / 4, 1 / 6]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(second, torch.tensor([0, -1 / 32, -1 / 108], dtype=torch.float64))
    assert torch.autograd.grad(second.sum(), x)[0][0] == 0
    assert root(torch.tensor([float("nan"), -1.0])).isnan().all()


@over_cases
def test_values_per_step_and_per_parameter(make, counterpart, options):
    forms = [[0.05] * 3, torch.full((3,), 0.05, dtype=torch.float64), dict.fromkeys(params(), 0.05)]
    expected = unrolled(params(), make(lr=0.05, **options))
    for form in forms:
        torch.testing.assert_close(unrolled(params(), make(lr=form, **options)), expected)


@pytest.mark.parametrize(
    ("make", "keywords", "message"),
    [
        (adam, {"lr": -1.0}, r"adam\(...\): lr must be at least 0, got -1"),
        (adam, {"eps": -1.0}, "eps must be at least 0"),
        (adam, {"weight_decay": -1.0}, "weight_decay must be at least 0"),
        (adam, {"betas": (1.0, 0.9)}, r"betas\[0\] must be below 1, got 1.0"),
        (adam, {"betas": (0.9, -0.1)}, r"betas\[1\] must be at least 0"),
        (adagrad, {"lr_decay": -1.0}, r"adagrad\(...\): lr_decay must be at least 0"),
        (adagrad, {"initial_accumulator_value": -1.0}, "initial_accumulator_value must be at least 0"),
        (rmsprop, {"alpha": 1}, r"rmsprop\(...\): alpha must be below 1, got 1"),
        (rmsprop, {"momentum": -1.0}, "momentum must be at least 0"),
    ],
)
def test_bad_hyperparameters_are_refused(make, keywords, message):
    with pytest.raises(ValueError, match=message):
        make(**keywords)


def row_sparse_step(rule):
    table = torch.ones(4, 2, requires_grad=True)
    gradient = RowSparse(torch.tensor([1]), torch.ones(1, 2), (4, 2))
    return rule.update({"table": gradient}, rule.init({"table": table}), {"table": table})


@pytest.mark.parametrize("make", [adam, adagrad, rmsprop])
def test_a_sparse_gradient_is_refused_with_the_way_out(make):
    with pytest.raises(
        TypeError, match=rf"gradient of 'table' is RowSparse.*rowwise\({make.__name__}\(...\)\)"
    ):
        row_sparse_step(make())


@pytest.mark.parametrize("options", [{"lr": 0.5}, {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.1}])
@pytest.mark.parametrize("form", [float, torch.tensor])
def test_sgd_takes_a_sparse_gradient_of_a_dense_table(options, form):
    new, _ = row_sparse_step(sgd(**{k: form(v) for k, v in options.items()}))
    table = torch.ones(4, 2, requires_grad=True)
    table.grad = RowSparse(torch.tensor([1]), torch.ones(1, 2), (4, 2)).to_dense()
    SGD([table], **options).step()
    torch.testing.assert_close(new["table"], table)
