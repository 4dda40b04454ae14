"""A meta-batch that was compiled before is one call of its graph, with the derivatives and errors of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import metagrad as mg
from metagrad.meta.inner.compiled import CompiledMAML
from metagrad.optim.rules import sgd
from metagrad.tasks import Batch, Examples
from tests.marks import slow

WHOLE = {"whole": True, "backend": "eager"}


def slope():
    """Return y = w x, w = 1."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    nn.init.ones_(model[0].weight)  # type: ignore[reportArgumentType]
    return model


def steep(prediction, target):
    """A finite gradient everywhere, and none beyond at zero."""
    return ((prediction - target).abs() ** 1.5).mean()


def slopes(*zero_tasks, infinite=()):
    """Four tasks, of which some have a prediction of exactly zero at each step, and some an infinite target."""
    x = 1 + torch.rand(4, 3, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    support, targets = x.clone(), x + 1
    support[list(zero_tasks)] = 0
    targets[list(infinite)] = float("inf")
    return Batch(Examples(support, torch.zeros_like(x)), Examples(x, targets))


@pytest.fixture
def calls(monkeypatch):
    """What the kept code returned, None where there was none."""
    made, call = [], CompiledMAML.kept_batch

    def noted(*args):
        made.append(call(*args))
        return made[-1]

    monkeypatch.setattr(CompiledMAML, "kept_batch", noted)
    return made


def prepared(**arguments):
    """Return a compiled MAML whose code has run, and one that is not compiled."""
    model = slope()
    given = {"inner": sgd(lr=0.1), "steps": 2, **arguments}
    compiled, eager = (mg.MAML(model, steep, compile=compile, **given) for compile in (WHOLE, False))
    compiled(slopes()).loss.backward()
    model.zero_grad()
    return compiled, eager


@pytest.fixture(scope="module")
def pair():
    return prepared()


def gradients(maml, batch, weigh):
    return torch.autograd.grad(weigh(maml(batch)), list(maml.parameters()))


def test_batches_of_other_sizes_are_calls_of_code_that_ran_before(pair, calls):
    compiled, eager = pair
    for tasks in (4, 3, 3, 4):
        batch = Batch(
            *(Examples(*(t[:tasks] for t in (part.x, part.y))) for part in (slopes().support, slopes().query))
        )
        got, expected = (gradients(maml, batch, lambda out: out.loss) for maml in (compiled, eager))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert [call is not None for call in calls] == [True, False, True, True]


WEIGHS = {
    "the loss": lambda out: out.loss,
    "the loss, scaled": lambda out: -3 * out.loss,
    "query losses alike": lambda out: out.query_losses.sum(),
    "query losses": lambda out: (out.query_losses * torch.arange(4)).sum(),
    "all": lambda out: out.loss + out.query_losses[1] + out.support_losses.sum() + out.query_outputs.sum(),
}


@pytest.mark.parametrize("weigh", [*map(slow, ("query losses", "all")), *list(WEIGHS)[:3]])
def test_derivatives_are_those_of_the_loop(pair, calls, weigh):
    got, expected = (gradients(maml, slopes(), WEIGHS[weigh]) for maml in pair)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert calls[-1] is not None
    assert calls[-1][1]


def test_second_derivatives_are_those_of_the_loop(pair, calls):
    def second(maml):
        params = list(maml.parameters())
        (g,) = torch.autograd.grad(maml(slopes()).loss, params, create_graph=True)
        return torch.autograd.grad(g.pow(3).sum(), params)

    torch.testing.assert_close(*map(second, pair), rtol=1e-12, atol=0)
    assert calls[-1] is not None


def test_a_graph_that_is_retained_can_be_walked_again(pair, calls):
    compiled, eager = pair
    out = compiled(slopes())
    first, second = (
        torch.autograd.grad(out.loss, list(compiled.parameters()), retain_graph=r)[0] for r in (True, False)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, gradients(eager, slopes(), lambda out: out.loss)[0], rtol=1e-12, atol=0)
    assert calls[-1] is not None


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_meta_gradient_that_is_not_finite_names_its_task(pair, calls, create_graph):
    compiled, _ = pair
    out = compiled(slopes(2))
    assert calls[-1] is not None
    assert not calls[-1][1]
    with pytest.raises(FloatingPointError, match=r"meta-gradient of task 2 is not finite.*1 of 4 tasks"):
        torch.autograd.grad(out.loss, list(compiled.parameters()), create_graph=create_graph)
    with pytest.raises(FloatingPointError, match=r"the loss of task 3 is inf on its query examples"):
        compiled(slopes(infinite=[3]))


@pytest.mark.slow
def test_tasks_are_skipped_likewise(calls):
    compiled, eager = prepared(nonfinite="skip")
    for batch in (slopes(1), slopes(infinite=[0, 2])):
        outs = compiled(batch), eager(batch)
        assert calls.pop(0) is not None  # and then for the tasks that are left
        calls.clear()
        grads = [torch.autograd.grad(out.loss, list(compiled.parameters()))[0] for out in outs]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=0)
        assert outs[0].skipped.tolist() == outs[1].skipped.tolist()


def test_arguments_of_known_forms_are_not_flattened_again(pair, calls, monkeypatch):
    compiled, _ = pair
    compiled(slopes())
    monkeypatch.setattr("metagrad.meta.inner.compiled.dissect", None)
    compiled(slopes())
    assert calls[-1] is not None


def test_a_gradient_that_overflows_once_it_is_scaled_is_left_to_the_scaler(pair, calls):
    compiled, _ = pair
    (gradient,) = gradients(compiled, slopes(), lambda out: out.loss * 1e308 * 10)
    assert gradient.isinf()
    (gradient,) = gradients(compiled, slopes(), lambda out: out.loss * float("nan"))
    assert gradient.isnan()
    assert calls[-1][1]
