"""NaN and Inf change neither parameters nor state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from metagrad.optim import KFAC, SOAP, Lion, Shampoo, SparseAdam
from tests.optim.torch_optim.cases import (
    Case,
    assert_equal,
    batch,
    classification,
    closure_of,
    every,
    network,
    of_cases,
    optimizer,
    run,
    snapshot,
    traits,
)


def nan_loss(case, model, opt):
    """A loss that is NaN, whose gradient is finite."""
    opt.step(closure_of(opt, lambda: classification(model)() + math.nan))


def bad_gradient(case, model, opt, value):
    closure = closure_of(opt, classification(model))

    def spoilt():
        loss = closure()
        model.second.weight.grad[0, 0] = value
        return loss

    opt.step(spoilt)


def nan_gradient(case, model, opt):
    bad_gradient(case, model, opt, math.nan)


def infinite_gradient(case, model, opt):
    bad_gradient(case, model, opt, math.inf)


def bad_curvature(case, model, opt):
    """Loss and gradient are finite."""
    x, y = batch()
    if "known loss" in case.traits:
        opt.step(closure_of(opt, lambda: F.cross_entropy(finite_once(model(x)), y)))
    elif "model" in case.traits:
        x[0] = 1e30  # its square overflows, and the gradient behind a tanh of 1 is zero
        opt.step(closure_of(opt, lambda: F.cross_entropy(model(x), y)))
    else:
        opt.step(closure_of(opt, lambda: F.cross_entropy(model(x), y) + kink(model.second.weight)))


def finite_once(output):
    """Make every cotangent but the first NaN."""
    seen = []

    def hook(cotangent):
        seen.append(cotangent)
        return cotangent if len(seen) == 1 else cotangent * math.nan

    output.register_hook(hook)
    return output


def kink(w):
    """Return zero, with a gradient of zero and an infinite second derivative."""
    return (w - w.detach()).abs().pow(1.5).sum()


def assert_same_state(one, other):
    values, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    assert spec == other_spec
    for a, b in zip(values, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def check(case: Case, mode: str, spoil, steps: int = 2, **options):
    model = network()
    opt = optimizer(case, model, nonfinite=mode, **options)
    run(opt, classification(model), steps)
    twin, other = copy.deepcopy((model, opt))
    if mode == "raise":
        with pytest.raises(FloatingPointError, match=rf"{case.name}\.step: the .* is NaN or inf.*nonfinite="):
            spoil(case, model, opt)
    else:
        spoil(case, model, opt)
        assert opt.stats["skipped"] == 1
    assert_equal(snapshot(model), snapshot(twin))
    assert_same_state(opt.state_dict(), other.state_dict())
    run(opt, classification(model), 1)
    run(other, classification(twin), 1)
    assert_equal(snapshot(model), snapshot(twin))
    assert_same_state(opt.state_dict(), other.state_dict())


modes = pytest.mark.parametrize("mode", ["raise", "skip"])


@every
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(case):
    for mode, spoil in (("raise", nan_loss), ("raise", infinite_gradient), ("skip", nan_gradient)):
        check(case, mode, spoil)


@of_cases(lambda case: case.traits & traits("twice", "known loss", "model"))
def test_a_curvature_that_is_not_finite_changes_nothing(case):
    for mode in ("raise", "skip"):
        check(case, mode, bad_curvature, steps=6)  # a multiple of every number of steps between two estimates


@every
def test_a_first_step_that_is_not_finite_leaves_no_state(case):
    check(case, "skip", nan_gradient, steps=0)


@every
def test_a_group_that_is_not_finite_holds_the_others_back(case):
    model = network()
    params = [{"params": [model.first.weight]}, {"params": [model.second.weight]}]
    opt = optimizer(case, model, params)
    with pytest.raises(FloatingPointError, match=r"'(param_groups\[1\]\[0\]|second\.weight)'"):
        nan_gradient(case, model, opt)
    assert_equal(snapshot(model), snapshot(network()))
    assert [group["step"] for group in opt.param_groups] == [0, 0]


@pytest.mark.parametrize("kind", ["coo", "table"])
def test_rows_that_are_not_finite_change_nothing(kind):
    table = nn.Embedding(9, 2, sparse=kind == "coo")
    opt = SparseAdam(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    opt.step()
    before, state = snapshot(table), copy.deepcopy(opt.state_dict())
    opt.zero_grad()
    (table(torch.tensor([1, 4])) * torch.tensor([[1.0], [math.nan]])).sum().backward()
    with pytest.raises(FloatingPointError, match=r"SparseAdam.step: the gradient of"):
        opt.step()
    assert_equal(snapshot(table), before)
    assert_same_state(opt.state_dict(), state)


def test_a_finite_gradient_whose_square_overflows_changes_nothing():
    w = torch.ones(3, requires_grad=True)
    opt = SparseAdam([w], lr=0.1)
    w.grad = torch.full((3,), 1e30)
    with pytest.raises(FloatingPointError, match="the new state 'square' of"):
        opt.step()
    assert w.tolist() == [1.0, 1.0, 1.0]
    assert not opt.state_dict()["state"]


def test_large_gradients_whose_norm_overflows_are_finite():
    w = torch.ones(3, requires_grad=True)
    opt = Lion([w], lr=0.25)
    w.grad = torch.full((3,), 1e38)
    opt.step()
    assert w.tolist() == [0.75, 0.75, 0.75]


def test_a_factorization_that_fails_leaves_parameters_of_other_groups_where_they_were():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    opt = KFAC(model, params=[{"params": [p]} for p in model.parameters()])
    opt.param_groups[1]["damping"] = 0.0
    before = snapshot(model)
    model(torch.zeros(4, 3)).sum().backward()
    with pytest.raises(torch.linalg.LinAlgError):
        opt.step()
    assert_equal(snapshot(model), before)
    assert not opt.state_dict()["state"]


FACTORISING = {
    "KFAC": lambda model, **how: KFAC(model, curvature_every=1, inverse_every=1, **how),
    "KFAC, eigen": lambda model, **how: KFAC(model, curvature_every=1, inverse_every=1, eigen=True, **how),
    "Shampoo": lambda model, **how: Shampoo(model.parameters(), root_every=1, **how),
    "SOAP": lambda model, **how: SOAP(model.parameters(), basis_every=1, **how),
}


@modes
@pytest.mark.parametrize("make", FACTORISING.values(), ids=FACTORISING)
def test_a_factorization_of_finite_numbers_that_fails_changes_nothing_and_is_counted(make, mode, monkeypatch):
    def failing(*_, **__):
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    model = network()
    opt, loss = make(model, nonfinite=mode), classification(model)
    run(opt, loss, 1)
    before, state = snapshot(model), copy.deepcopy(opt.state_dict())
    with monkeypatch.context() as patch:
        for name in ("cholesky", "eigh", "qr", "solve"):
            patch.setattr(torch.linalg, name, failing)
        if mode == "raise":
            with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
                run(opt, loss, 1)
        else:
            run(opt, loss, 2)
    assert opt.stats["skipped"] == (2 if mode == "skip" else 0)
    assert_equal(snapshot(model), before)
    assert_same_state(opt.state_dict(), state)
    run(opt, loss, 1)
    assert opt.param_groups[0]["step"] == 2


@every
def test_what_to_do_is_one_of_two_and_the_same_in_all_groups(case):
    model = network()
    with pytest.raises(ValueError, match=rf"{case.name}\(.*nonfinite\): .* 'raise', 'skip', got 'warn'"):
        optimizer(case, model, nonfinite="warn")
    groups = [{"params": [model.first.weight]}, {"params": [model.second.weight], "nonfinite": "skip"}]
    with pytest.raises(ValueError, match=r"nonfinite must be the same in all groups.*'raise' and 'skip'"):
        optimizer(case, model, groups)
