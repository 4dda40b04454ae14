"""The message of each mistake in a call of a derivative, once."""

import pytest
import torch
from torch import nn

import metagrad as mg
from metagrad.autograd import attention, hvp, linear_cross_entropy, lint
from metagrad.autograd.derivatives.linearize import linearize
from tests.losses import loss_of
from tests.sparse.mistakes import complaints

ones = torch.ones
W, B = ones(2, requires_grad=True), ones(2, requires_grad=True)
WIDE = ones(2, dtype=torch.float64, requires_grad=True)
LABELS = torch.tensor([0, 1])
X, Y = ones(5, 3), ones(5, 2)
MODEL = nn.Linear(3, 2)
PARAMS = {name: p.detach() for name, p in MODEL.named_parameters()}


def loss():
    return W.square().sum()


def squares(prediction, y):
    return (prediction - y).square()


def product(loss_fn=lambda prediction, y: squares(prediction, y).mean(), mode="reverse", params=PARAMS, **v):
    return hvp(loss_of(MODEL, loss_fn), params, {**PARAMS, **v}, X, Y, mode=mode)


def linear(v, **options):
    with linearize(loss(), {"w": W}) as lin:
        return lin.hvp(v, **options)


def of_two(v):
    with linearize((W * B).sum(), [W, B]) as lin:
        return lin.hvp(v)


def unrolled(step=lambda x, t: (x, None), state=W, **options):
    return mg.unroll(step, state, **{"steps": 3, **options})


VALUE_ERRORS = {
    r"grad\(loss, params.*one element, got shape \(2,\)": lambda: mg.grad(W * 2, W),
    "grad.*no graph": lambda: mg.grad(ones(()), W),
    r"grad.*params\['w'\] does not require grad": lambda: mg.grad(loss(), {"w": ones(1)}),
    r"grad.*does not depend on params\['layer.bias'\]": lambda: mg.grad(loss(), {"w": W, "layer.bias": B}),
    r"linearize\(loss, params\): loss must have one element, got shape": lambda: linearize(W * 2, {"w": W}),
    r"linearize\(loss, params\): the loss has no graph": lambda: linearize(ones(()), {"w": W}),
    r"does not depend on params\['b'\]. Leave it out of params": lambda: linearize(loss(), {"w": W, "b": B}),
    r"linearize.*params\['w'\] does not require grad": lambda: linearize(loss(), {"w": ones(2)}),
    "there are no parameters": lambda: linearize(loss(), {}),
    "v: expected the structure of the parameters": lambda: linear([ones(2)]),
    r"params\['w'\] must be as its parameter is.*got \(\(3,\)": lambda: linear({"w": ones(3)}),
    r"got \(\(2,\), torch.float64\)": lambda: linear({"w": ones(2).double()}),
    "a stack of as many as the others.*": lambda: linear({"w": ones(0, 2)}),
    "a stack of as many as the others": lambda: of_two([ones(2), ones(3, 2)]),
    "chunk must be bytes": lambda: linear({"w": ones(2)}, chunk="auto"),
    r"mode\): expected one of reverse, forward, got 'auto'": lambda: product(mode="auto"),
    "v: expected the structure of params": lambda: product(other=ones(2)),
    r"v\['bias'\]: expected the shape and dtype .*\(\(2,\).*\(5,\)": lambda: product(bias=ones(5)),
    r"the loss: expected one element, got \(5, 2\)": lambda: product(squares),
    r"lint\(loss\): the loss has no graph": lambda: lint(ones(())),
    "order must be from 1 to 3, got 4.*gradcheck": lambda: lint(loss(), order=4),
    "no input requires grad": lambda: mg.gradcheck(torch.sin, [ones(2)]),
    r"inputs\[0\] must be float64.*got torch.float32": lambda: mg.gradcheck(torch.sin, [W]),
    "order.*1 or more, got 0": lambda: mg.gradcheck(torch.sin, [WIDE], order=0),
    "directions.*got 0": lambda: mg.gradcheck(torch.sin, [WIDE], directions=0),
    "returns no floating point tensor": lambda: mg.gradcheck(lambda x: (x > 0).sum(), [WIDE]),
    "expected an int of 0 or more, got -1": lambda: unrolled(steps=-1),
    "\"512MiB\", got 'none'": lambda: unrolled(memory="none"),
    '"512MiB", got True': lambda: unrolled(memory=True),
    "from 1 to steps=3.*got 0": lambda: unrolled(truncate=0),
    "from 1 to steps=3.*got True": lambda: unrolled(truncate=True),
    r"inputs\): .* length steps=3, .* got inputs\['x'\]: \(\)": lambda: unrolled(inputs={"x": ones(())}),
    r"inputs\): .* got inputs\[1\]: float": lambda: unrolled(inputs=(ones(3), 0.1)),
    r"inputs\): .* got inputs: \(3, 3\), torch.sparse_coo": lambda: unrolled(inputs=torch.eye(3).to_sparse()),
    r"states\): expected None or an int of 2 or more": lambda: unrolled(states=1),
    r"linear_cross_entropy\(.*shapes \[..., features\]": lambda: linear_cross_entropy(X, ones(5, 4), LABELS),
    r"labels from 0 to 4.*\[0, 5\]": lambda: linear_cross_entropy(ones(2, 3), X, 5 * LABELS),
    r"attention\(.*shapes \[..., queries": lambda: attention(ones(2, 3), ones(4, 2), ones(4, 1)),
    r"attention\(.*shapes \[..., queries, ": lambda: attention(ones(2, 3), ones(4, 3), ones(5, 1)),
}
TYPE_ERRORS = {
    r"grad.*must be a tensor, got float": lambda: mg.grad(1.0, W),
    r"grad.*params\['w'\] must be a tensor, got float": lambda: mg.grad(loss(), {"w": 1.0}),
    r"linearize\(loss, params\): loss must be a tensor, got float": lambda: linearize(1.0, {"w": W}),
    r"linearize.*params\['w'\] must be a tensor, got float": lambda: linearize(loss(), {"w": 1.0}),
    r"params\['bias'\] must be a floating point tensor": lambda: product(params={**PARAMS, "bias": LABELS}),
    r"v\['bias'\] must be a floating point tensor, got float": lambda: product(bias=0.0),
    "must return": lambda: product(lambda *args: (squares(*args).mean(),)),
    r"lint\(loss\): loss must be a tensor, got float": lambda: lint(1.0),
    "expected int, got float": lambda: unrolled(steps=1.5),
    "aux must hold tensors or None, got float": lambda: unrolled(lambda x, t: (x, 1.0)),
    "labels must be classes as integers": lambda: linear_cross_entropy(ones(2, 3), X, ones(2)),
}
ERRORS = {ValueError: VALUE_ERRORS, TypeError: TYPE_ERRORS}


@pytest.mark.parametrize("error", ERRORS)
def test_each_mistake_is_named(error):
    assert complaints(ERRORS[error], error) == {}
