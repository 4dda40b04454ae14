"""MAML under torch.func: reverse mode with respect to all adapted parameters is supported, the rest raises."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import metagrad as mg
from tests.meta.textbook import learner, net, textbook


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
