"""Learned hyperparameters and losses of MAML, and how changes of them take effect."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.nn.utils import parametrize

import metagrad as mg
from tests.meta.textbook import Scaled, assert_learns_as, learner, net, some_tasks, textbook

rules = mg.optim.rules


def learned(value=0.1, **options):
    lr = nn.Parameter(torch.tensor(value, dtype=torch.float64))
    return mg.MAML(net(), F.mse_loss, inner=rules.sgd(lr=lr), **{"steps": 2, **options})


def expected_at(value, batch, of="model", **options):
    """Return the loss of a new MAML with another learning rate, and its gradient."""
    maml = learned(value, **options)
    loss = maml(batch).loss
    return loss.detach(), torch.autograd.grad(loss, maml.inner_lr)[0]


class Positive(nn.Module):
    def forward(self, raw):
        return raw.exp()


def assigned(maml, value):
    maml.inner_lr = nn.Parameter(value)
    return maml.inner_lr


def loaded(maml, value):
    maml.load_state_dict({**maml.state_dict(), "inner_lr": value}, assign=True)
    return maml.inner_lr


def converted(maml, value):
    """Convert to another dtype and back, which creates other parameters."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        old = maml.inner_lr
        maml.float().double()
        assert maml.inner_lr is not old
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    with torch.no_grad():
        maml.inner_lr.copy_(value)
    return maml.inner_lr


def copied(maml, value):
    with torch.no_grad():
        maml.inner_lr.copy_(value)
    return maml.inner_lr


CHANGES = {
    "assigned": assigned,
    "load_state_dict(assign=True)": loaded,
    "converted": converted,
    "in place": copied,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("memory", ["full", "step"])
def test_a_learned_hyperparameter_exists_once(regression, change, memory):
    maml = learned(memory=memory)
    maml(regression).loss.backward()
    leaf = CHANGES[change](maml, torch.tensor(0.3, dtype=torch.float64))
    loss, gradient = expected_at(0.3, regression)
    out = maml(regression)
    torch.testing.assert_close(out.loss, loss)
    leaf.grad = None
    out.loss.backward()
    torch.testing.assert_close(leaf.grad, gradient)
    assert maml.inner.lr is maml.inner_lr is dict(maml.named_parameters())["inner_lr"] is leaf
    torch.testing.assert_close(maml.adapt(regression.support).support_losses, out.support_losses)


@pytest.mark.parametrize(("memory", "task_chunk"), [("full", None), ("step", 1), ("sqrt", None)])
def test_functional_call_reaches_the_rule(regression, memory, task_chunk):
    maml = learned(memory=memory, task_chunk=task_chunk)
    values = {name: p.detach().clone().requires_grad_() for name, p in maml.named_parameters()}
    values["inner_lr"] = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    loss = functional_call(maml, values, (regression,)).loss
    expected, gradient = expected_at(0.3, regression)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close(values["inner_lr"].grad, gradient)
    assert maml.inner_lr.grad is None
    assert maml.inner_lr.item() == 0.1


def test_a_parametrized_learning_rate(regression):
    maml = learned(0.0)
    parametrize.register_parametrization(maml, "inner_lr", Positive())
    raw = maml.parametrizations.inner_lr.original
    with torch.no_grad():
        raw.copy_(torch.tensor(0.3).log())
    out = maml(regression)
    value = float(raw.detach().exp())
    loss, gradient = expected_at(value, regression)
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(torch.autograd.grad(out.loss, raw)[0], gradient * value)


def test_hyperparameters_for_each_parameter_keep_their_names_and_survive_copies(regression):
    values = {name: nn.Parameter(torch.full_like(p, 0.1)) for name, p in net().named_parameters()}
    maml = mg.MAML(net(), F.mse_loss, inner=rules.sgd(lr=values), steps=2)
    names = [f"inner_lr_{name.replace('.', '_')}" for name, _ in net().named_parameters()]
    assert [name for name in maml.state_dict() if name.startswith("inner")] == names
    other = copy.deepcopy(maml)
    torch.testing.assert_close(other(regression).loss, maml(regression).loss)
    with torch.no_grad():
        other.inner_lr_0_weight.zero_()
    assert not torch.allclose(other(regression).loss, maml(regression).loss)


@pytest.mark.parametrize(("memory", "task_chunk"), [("full", None), ("step", 1), ("sqrt", None)])
def test_parameters_of_the_loss_are_learned(regression, memory, task_chunk):
    model, loss_fn = net(), Scaled()
    maml = learner(mg.MAML, model, loss_fn, memory=memory, task_chunk=task_chunk)
    assert "loss_fn.scale" in dict(maml.named_parameters())
    losses = textbook(model, loss_fn, regression, lr=0.1, steps=2)
    assert_learns_as(maml(regression), losses, [*model.parameters(), loss_fn.scale])


class Rooted(Scaled):
    """A loss whose derivative is not finite if all targets are zero."""

    def forward(self, prediction, target):
        return super().forward(prediction, target) + 0 * target.abs().sum().mul(self.scale).sqrt()


@pytest.mark.parametrize("functional", [False, True])
def test_gradients_of_the_loss_that_are_not_finite_are_left_out(regression, functional):
    """The gradients belong to the parameters of the call, also after the end of a functional call."""
    regression.query.y[1] = 0
    model, loss_fn = net(), Rooted()
    maml = mg.MAML(model, loss_fn, inner=rules.sgd(lr=0.1), steps=2, nonfinite="skip")
    parameters = dict(maml.named_parameters())
    if functional:
        maml.requires_grad_(True)
        parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
        with torch.no_grad():
            loss_fn.scale.fill_(1.0)
        loss = functional_call(maml, parameters, (regression,)).loss
    else:
        loss = maml(regression).loss
    got = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    with torch.no_grad():
        loss_fn.scale.fill_(1.5)
    rest = some_tasks(regression, [0, 2, 3])
    expected = torch.autograd.grad(
        textbook(model, loss_fn, rest, lr=0.1, steps=2).sum() / 4, [*model.parameters(), loss_fn.scale]
    )
    torch.testing.assert_close(list(got.values()), list(expected))
    maml.nonfinite = "raise"
    loss = maml(regression).loss
    with pytest.raises(FloatingPointError, match=r"task 1 is not finite"):
        loss.backward()


def make(**options):
    lr = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
    return learner(mg.MAML, net(), inner=mg.optim.rules.sgd(lr=lr), **options)


def values_of(maml):
    return {name: p.detach() for name, p in maml.named_parameters()}


def loss_at(maml, batch):
    return lambda params: functional_call(maml, params, (batch,)).loss


@pytest.mark.parametrize("options", [{}, {"task_chunk": 1}, {"truncate": 1}], ids=str)
@pytest.mark.parametrize("transform", [grad, jacrev])
def test_reverse_mode_of_a_functional_call(regression, options, transform):
    maml = make(**options)
    got = transform(loss_at(maml, regression))(values_of(maml))
    truncate = options.get("truncate")
    loss = textbook(maml.model, F.mse_loss, regression, lr=maml.inner_lr, steps=2, truncate=truncate).mean()
    expected = torch.autograd.grad(loss, list(maml.parameters()))
    torch.testing.assert_close([got[name] for name, _ in maml.named_parameters()], list(expected))


OTHERS = {
    "vmap of params": lambda maml, b: vmap(loss_at(maml, b))(
        {name: torch.stack([p, p]) for name, p in values_of(maml).items()}
    ),
    "vmap of data": lambda maml, b: vmap(lambda x: maml(((x, b[0].y), b[1])).loss)(torch.stack([b[0].x] * 2)),
    "jvp": lambda maml, b: jvp(loss_at(maml, b), (values_of(maml),), (values_of(maml),)),
    "jacfwd": lambda maml, b: jacfwd(loss_at(maml, b))(values_of(maml)),
    "a part": lambda maml, b: grad(lambda p: loss_at(maml, b)({**values_of(maml), "model.0.weight": p}))(
        maml.model[0].weight.detach()
    ),
    "the rule": lambda maml, b: grad(lambda lr: loss_at(maml, b)({**values_of(maml), "inner_lr": lr}))(
        maml.inner_lr.detach()
    ),
    "data": lambda maml, b: grad(lambda x: maml(((x, b[0].y), b[1])).loss)(b[0].x),
}


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_other_transforms_say_what_to_do(regression, task_chunk):
    maml = make(task_chunk=task_chunk)
    for transform in OTHERS.values():
        with pytest.raises(RuntimeError, match="call it batch by batch; instead of jvp, or for"):
            transform(maml, regression)


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.parametrize("task_chunk", [None, 1])
def test_constants_in_a_functional_call_are_adapted_as_the_parameters_are(regression, memory, task_chunk):
    """A tensor that does not require grad is not a frozen parameter."""
    maml = make(memory=memory, task_chunk=task_chunk)
    maml.model[2].bias.requires_grad_(False)
    expected = maml(regression).loss
    torch.testing.assert_close(loss_at(maml, regression)(values_of(maml)), expected)
    values = values_of(maml)
    values["model.0.weight"].requires_grad_()
    loss = loss_at(maml, regression)(values)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, values["model.0.weight"]),
        torch.autograd.grad(expected, maml.model[0].weight),
    )
    with torch.no_grad():
        torch.testing.assert_close(loss_at(maml, regression)(values_of(maml)), expected)
