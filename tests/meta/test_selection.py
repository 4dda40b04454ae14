"""Adapted parameters by name, pattern, module or predicate. All tasks share the other parameters."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import slow
from tests.meta.textbook import (
    Adapting,
    Scaled,
    assert_close,
    assert_learns_as,
    gradients,
    learner,
    some_tasks,
    textbook,
)

rules = mg.optim.rules


class Net(nn.Module):
    """A model with a body, a head and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((self.scale * self.body(x)).tanh())


def net():
    torch.manual_seed(0)
    return Net().double()


def maml_of(model, adapt, loss_fn=F.mse_loss, **options):
    return learner(mg.MAML, model, loss_fn, **{"inner": rules.sgd(lr=0.3), **options}, adapt=adapt)


HEAD = ["head.weight", "head.bias"]
BODY = ["scale", "body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias"]
CHOICES = {
    "all": (lambda model: None, [*BODY, *HEAD]),
    "a parameter": (lambda model: "head.weight", HEAD[:1]),
    "a module's name": (lambda model: "head", HEAD),
    "a pattern": (lambda model: "head.*", HEAD),
    "all but a pattern": (lambda model: "!head.*", BODY),
    "all but a module's name": (lambda model: ["!head"], BODY),
    "several": (lambda model: ("head.*", "body.2", "!*.bias"), ["body.2.weight", "head.weight"]),
    "a module": (lambda model: model.body[2], BODY[3:]),
    "modules and names": (lambda model: [model.head, "scale"], ["scale", *HEAD]),
    "a predicate": (lambda model: lambda name, p: p.ndim == 1 and "body" not in name, ["scale", "head.bias"]),
}


def test_what_adapts(regression):
    model = net()
    found = {
        choice: list(maml_of(model, make(model)).adapt(regression.support).params)
        for choice, (make, _) in CHOICES.items()
    }
    assert found == {choice: names for choice, (_, names) in CHOICES.items()}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Linear(3, 3, bias=False), nn.Parameter(torch.zeros(3))
        self.out = nn.Linear(3, 3)
        self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.table(x).tanh() + self.bias)


def test_a_tied_parameter_has_all_of_its_names():
    x = torch.randn(2, 4, 3)
    expected = {
        "out.weight": ["table.weight"],
        "out": ["table.weight", "out.bias"],
        "!out": ["bias"],
        "!out.weight": ["bias", "out.bias"],
    }
    assert {name: list(maml_of(Tied(), name).adapt((x, x)).params) for name in expected} == expected


def test_the_attribute_may_be_assigned(regression):
    model = net()
    maml = maml_of(model, None)
    maml.adapted = model.head
    names = list(maml.state_dict())
    assert names == [f"model.{name}" for name in model.state_dict()]
    assert list(maml.adapt(regression.support).params) == HEAD
    for copied in (copy.deepcopy(maml), pickle.loads(pickle.dumps(maml))):
        assert list(copied.adapt(regression.support).params) == HEAD
        assert copied.adapted[0] is copied.model.head
    maml.adapted = "body.2"
    assert list(maml.adapt(regression.support).params) == BODY[3:]


@pytest.mark.parametrize("loss_fn", [F.mse_loss, Scaled()], ids=["mse", "learned loss"])
@pytest.mark.parametrize(
    ("order", "task_chunk", "memory"),
    [(1, None, "full"), (2, 1, "full"), (2, None, "step"), slow(1, 1, "sqrt"), slow(2, None, "64KiB")],
)
def test_shared_parameters_get_the_gradient_of_a_plain_loop(regression, order, task_chunk, memory, loss_fn):
    model = net()
    maml = maml_of(
        model, ["head", "body.0.weight"], loss_fn, order=order, memory=memory, task_chunk=task_chunk
    )
    names = ["body.0.weight", *HEAD]
    expected = textbook(model, loss_fn, regression, lr=0.3, steps=2, order=order, names=names)
    assert_learns_as(maml(regression), expected, maml.parameters())


def test_an_adapted_model_keeps_what_is_shared(regression):
    """The parameters are restored before the adapted model is called."""
    maml = maml_of(net(), "head")
    values = {name: p.detach() * 1.1 for name, p in Adapting(maml).named_parameters()}
    adapted = functional_call(Adapting(maml), values, (regression.support,))
    other = net()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    expected = maml_of(other, "head").adapt(regression.support)(regression.query.x)
    torch.testing.assert_close(adapted(regression.query.x), expected)
    torch.testing.assert_close(
        functional_call(maml, dict(maml.named_parameters()), (regression,)).loss, maml(regression).loss
    )


class Rooted(nn.Module):
    """A body whose gradient is infinite where its input is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head((x + self.shift).abs().sqrt())


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_gradients_of_shared_parameters_are_looked_at(regression, task_chunk):
    torch.manual_seed(0)
    model = Rooted().double()
    x = regression.support.x.clone()
    x[2, 1] = 0.0
    batch = Batch(Examples(x, regression.support.y), regression.query)
    maml = maml_of(model, "head", task_chunk=task_chunk)
    with pytest.raises(FloatingPointError, match="meta-gradient of task 2 is not finite"):
        maml(batch).loss.backward()
    maml = maml_of(model, "head", task_chunk=task_chunk, nonfinite="skip")
    out = maml(batch)
    found = gradients(out.loss, model.parameters())
    assert out.skipped.tolist() == [False, False, True, False]
    others = some_tasks(batch, [0, 1, 3])
    expected = textbook(model, F.mse_loss, others, lr=0.3, steps=2, names=HEAD).sum() / 4
    assert_close(found, gradients(expected, model.parameters()))
