"""What parameters start from in each task: the meta-gradient through it, and every setting of MAML around it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import combined

sgd = mg.optim.rules.sgd


class Net(nn.Module):
    """A network with a context that is added to its hidden features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Linear(2, 4), nn.Linear(4, 3)
        self.context = nn.Parameter(torch.randn(4))
        self.double()

    def forward(self, x):
        return self.leave(torch.tanh(self.enter(x)) + self.context)


def from_support(model, x, y):
    """Non-linear in the meta-parameters of the body, in inputs and in targets."""
    h = torch.tanh(model.enter(x))
    return {
        "leave.weight": (y.t() @ h) / len(x) + model.leave.weight**2,
        "leave.bias": model.leave(h).sin().mean(0),
    }


def mean_feature(model, x, y):
    return model.enter(x).exp().mean(0) + y.mean()


class Learned(nn.Module):
    """A start with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, model, x, y):
        return {"context": self.scale.exp() * mean_feature(model, x, y)}


def zeros(model, x, y):
    return torch.zeros(4, dtype=torch.float64)


STARTS: dict[str, Any] = {
    "zeros": (lambda: {"context": "zeros"}, lambda start: lambda *args: {"context": zeros(*args)}),
    "one name": (
        lambda: {"context": mean_feature},
        lambda start: lambda *args: {"context": mean_feature(*args)},
    ),
    "a pattern": (lambda: {"leave.*": from_support}, lambda start: from_support),
    "two": (
        lambda: {"leave.*": from_support, "context": "zeros"},
        lambda start: lambda *args: {**from_support(*args), "context": zeros(*args)},
    ),
    "a function": (lambda: from_support, lambda start: from_support),
    "a module": (Learned, lambda start: start),
}


def gradients(loss, module):
    return torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True)


def make(start="two", **options):
    maml = mg.MAML(
        Net(), F.mse_loss, **{"inner": sgd(lr=0.1), "steps": 3, "start": STARTS[start][0](), **options}
    )
    return maml, STARTS[start][1](maml.start)


def is_fast(start, memory, order, task_chunk):
    is_one = start == "two" and (memory == "step" or (memory == "full" and order == 1))
    return is_one if memory != "full" or order == 1 or task_chunk == 3 else True


@pytest.mark.parametrize(
    ("start", "memory", "order", "task_chunk"),
    combined(STARTS, ["full", "step", "sqrt", "160KiB"], [1, 2], [None, 1, 3], fast=is_fast),
)
def test_meta_gradient_equals_the_textbook_loop(textbook, regression, start, memory, order, task_chunk):
    maml, function = make(start, memory=memory, order=order, task_chunk=task_chunk)
    expected = textbook(maml.model, F.mse_loss, regression, start=function, lr=0.1, steps=3, order=order)
    out = maml(regression)
    torch.testing.assert_close(out.query_losses, expected, rtol=1e-9, atol=1e-12)
    got = gradients(out.loss, maml)
    torch.testing.assert_close(got, gradients(expected.mean(), maml), rtol=1e-9, atol=1e-12)
    assert max(float(g.norm()) for g in got) > 1e-2


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_the_gradient_of_the_meta_gradient(textbook, regression, task_chunk):
    maml, function = make("two", task_chunk=task_chunk, memory="step")
    losses = (
        maml(regression).loss,
        textbook(maml.model, F.mse_loss, regression, start=function, lr=0.1, steps=3).mean(),
    )
    found = []
    for loss in losses:
        params = [p for name, p in maml.named_parameters() if "context" not in name]
        first = torch.autograd.grad(loss, params, create_graph=True)
        found.append(torch.autograd.grad(torch.stack([g.pow(3).sum() for g in first]).sum(), params))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("task_chunk", [None, 1])
def test_adapted_parameters_start_there_too(textbook, regression, steps, task_chunk):
    maml, function = make("two", task_chunk=task_chunk)
    expected = textbook(maml.model, F.mse_loss, regression, start=function, lr=0.1, steps=steps)
    with torch.no_grad():
        fast = maml.adapt(regression.support, steps=steps)
        got = (fast(regression.query.x) - regression.query.y).square().mean((1, 2))
        torch.testing.assert_close(maml(regression, steps=steps).query_losses, expected)
    torch.testing.assert_close(got, expected)


def test_truncated_steps_pass_the_gradient_on_to_the_start(textbook, regression):
    maml, function = make("a pattern", truncate=1)
    out = maml(regression)

    def truncated(model, x, y):
        """The start, moved by the first two steps as if these were constants."""
        fast = {**dict(model.named_parameters()), **function(model, x, y)}
        fast = {name: value.clone() for name, value in fast.items()}
        moved = fast
        for _ in range(2):
            loss = F.mse_loss(functional_call(model, moved, (x,)), y)
            grads = torch.autograd.grad(loss, list(moved.values()), retain_graph=True)
            moved = {name: p - 0.1 * g for (name, p), g in zip(moved.items(), grads, strict=True)}
        return {name: moved[name].detach() + fast[name] - fast[name].detach() for name in fast}

    expected = textbook(maml.model, F.mse_loss, regression, start=truncated, lr=0.1, steps=1)
    torch.testing.assert_close(
        gradients(out.loss, maml), gradients(expected.mean(), maml), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("memory", ["full", "step"])
def test_the_loss_after_each_step(textbook, regression, memory):
    """Query losses on the way have gradients through the start, too."""
    weights = [0.2, 0.3, 0.5]
    maml, function = make("two", query_weights=weights, memory=memory)
    steps = [textbook(maml.model, F.mse_loss, regression, start=function, lr=0.1, steps=t) for t in (1, 2, 3)]
    expected = torch.stack([w * losses.mean() for w, losses in zip(weights, steps, strict=True)]).sum()
    got = gradients(maml(regression).loss, maml)
    torch.testing.assert_close(got, gradients(expected, maml), rtol=1e-9, atol=1e-12)


def test_a_module_is_a_part_of_maml(regression):
    maml, _ = make("a module")
    assert dict(maml.named_parameters())["start.scale"].grad is None
    assert "start.scale" in maml.state_dict()
    maml(regression).loss.backward()
    gradient = dict(maml.named_parameters())["start.scale"].grad
    assert gradient is not None
    assert float(gradient.abs()) > 1e-3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda maml: pickle.loads(pickle.dumps(maml))])
def test_copies(regression, copied):
    maml, _ = make("a pattern")
    expected = maml(regression).loss
    torch.testing.assert_close(copied(maml)(regression).loss, expected)


@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize("start", STARTS)
def test_reverse_mode_of_torch_func(regression, start, task_chunk):
    maml, _ = make(start, task_chunk=task_chunk)
    values = {name: p.detach() for name, p in maml.named_parameters()}
    got = grad(lambda params: functional_call(maml, params, (regression,)).loss)(values)
    expected = gradients(maml(regression).loss, maml)
    torch.testing.assert_close(tuple(got.values()), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_graph_of_a_meta_batch_takes_zeros_alone(textbook, regression):
    options = {"compile": {"backend": "eager", "whole": True}}
    maml, function = make("zeros", **options)
    expected = textbook(maml.model, F.mse_loss, regression, start=function, lr=0.1, steps=3)
    got = gradients(maml(regression).loss, maml)
    torch.testing.assert_close(got, gradients(expected.mean(), maml), rtol=1e-9, atol=1e-12)
    maml, function = make("a pattern", **options)
    expected = textbook(maml.model, F.mse_loss, regression, start=function, lr=0.1, steps=3)
    with pytest.warns(UserWarning, match="start= calls a function"):
        loss = maml(regression).loss
    torch.testing.assert_close(gradients(loss, maml), gradients(expected.mean(), maml), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_tables_of_which_rows_are_adapted(textbook, task_chunk):
    """A start that looks rows up, whose gradient is of these rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    ids = torch.randint(0, 50, (2, 3, 6))
    batch = Batch(*(Examples(i, torch.randn(3, 6, 3).double()) for i in ids))

    def start(model, x, y):
        return model[:2](x).square().sum(0)[:3] + y.sum(0)

    def by_name(model, x, y):
        return {"2.bias": start(model, x, y)}

    options: Any = {"inner": sgd(lr=0.1), "steps": 2, "task_chunk": task_chunk, "sparse": ["0.weight"]}
    maml = mg.MAML(model, F.mse_loss, start={"2.bias": start}, **options)
    expected = gradients(textbook(model, F.mse_loss, batch, start=by_name, lr=0.1, steps=2).mean(), maml)
    table, *others = gradients(maml(batch).loss, maml)
    assert isinstance(table, mg.sparse.RowSparse)
    torch.testing.assert_close((table.to_dense(), *others), expected, rtol=1e-9, atol=1e-12)
    for of_table in ({"0.weight": "zeros"}, lambda model, x, y: {"0.weight": model[0].weight}):
        with pytest.raises(ValueError, match=r"'0.weight' is in sparse=, and tasks adapt rows of it"):
            mg.MAML(model, F.mse_loss, start=of_table, **options)(batch)


@pytest.mark.parametrize("memory", ["full", "step"])
def test_the_state_of_the_inner_loop_stays_in_float32(regression, memory):
    batch = Batch(*(Examples(part.x.float(), part.y.float()) for part in regression))
    maml = mg.MAML(
        Net().float(), F.mse_loss, inner=sgd(lr=0.1), steps=2, memory=memory, start={"leave.*": from_support}
    )
    exact = gradients(maml(batch).loss, maml)
    with torch.autocast("cpu", torch.bfloat16):
        out, fast = maml(batch), maml.adapt(batch.support)
    assert {p.dtype for p in fast.params.values()} == {torch.float32}
    torch.testing.assert_close(gradients(out.loss, maml), exact, rtol=0.2, atol=0.05)


def test_a_task_whose_start_is_not_finite(regression):
    support = regression.support.x.clone()
    support[2, 0, 0] = float("nan")
    batch = Batch(Examples(support, regression.support.y), regression.query)
    maml, _ = make("one name")
    with pytest.raises(FloatingPointError, match=r"the loss of task 2 is .* at inner step 0"):
        maml(batch)
    maml, _ = make("one name", nonfinite="skip")
    out = maml(batch)
    assert out.skipped.tolist() == [False, False, True, False]
    kept = Batch(*(Examples(part.x[[0, 1, 3]], part.y[[0, 1, 3]]) for part in batch))
    torch.testing.assert_close(
        gradients(out.loss, maml), gradients(maml(kept).loss, maml), rtol=1e-9, atol=1e-12
    )


def test_a_task_whose_start_has_no_finite_gradient(regression):
    """The root of zero: its gradient is looked at where it enters the parameters."""

    def root(model, x, y):
        return (model.enter(x).square().sum(0) * x[0, 0].abs()).sqrt()

    support = regression.support.x.clone()
    support[1, 0, 0] = 0
    batch = Batch(Examples(support, regression.support.y), regression.query)
    maml, _ = make(start="zeros", nonfinite="skip")
    maml.start = {"context": root}
    out = maml(batch)
    got = gradients(out.loss, maml)
    assert out.skipped.tolist() == [False, True, False, False]
    kept = Batch(*(Examples(part.x[[0, 2, 3]], part.y[[0, 2, 3]]) for part in batch))
    expected = gradients(maml(kept).query_losses.sum() / 4, maml)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def test_the_memory_tracker_shows_it(regression):
    maml, _ = make("two")
    maml(regression)
    with mg.MemoryTracker() as tracker:
        maml(regression).loss.backward()
    assert [record.name for record in tracker.records()].count("start") == 1


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "pattern": ({"contxt": "zeros"}, ValueError, "'contxt' stands for is no parameter of the model"),
    "value": ({"context": "ones"}, TypeError, 'expected "zeros" or a function .* for .context., got .ones.'),
    "twice": ({"leave.*": "zeros", "*.bias": "zeros"}, ValueError, "'leave.bias' has two starts"),
    "kind": (3, TypeError, "expected a function .* or a mapping .* got 3"),
    "module": ({"context": Learned()}, TypeError, "a module among the values of a mapping"),
    "name": (lambda m, x, y: {"head": y}, ValueError, "a value for 'head', which is none of the parameters"),
    "tensor": (lambda m, x, y: y, TypeError, "must return a mapping of names to tensors, got a Tensor"),
    "numbers": ({"leave.*": lambda m, x, y: 0.0}, TypeError, "for leave.weight, leave.bias by name, got a float"),
    "names": (
        {"leave.*": lambda m, x, y: {"leave.bias": y[0]}},
        ValueError,
        "must return values for leave.weight, leave.bias, got them for leave.bias",
    ),
    "shape": ({"context": lambda m, x, y: y[0]}, ValueError, r"'context' is \(4,\), but the function returns \(3,\)"),
    "dtype": (
        {"context": lambda m, x, y: mean_feature(m, x, y).float()},
        ValueError,
        r"'context' is torch.float64 on cpu, but the function returns torch.float32 on cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_to_change(regression, case):
    start, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        mg.MAML(Net(), F.mse_loss, inner=sgd(lr=0.1), steps=1, start=start)(regression)
