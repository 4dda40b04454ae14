"""The features of leading layers that no task changes are computed once, and only where that is exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.meta.objective.features import split_layers
from metagrad.tasks import Batch, Examples
from tests.marks import combined, slow

rules = mg.optim.rules


class Counted(nn.Linear):
    """A layer that says of itself that it is a function, and is told how often it was called."""

    is_function = True
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x).sin()


class Undeclared(Counted):
    """Another class, which says nothing."""


def chain(first=nn.Linear, middle=None):
    torch.manual_seed(0)
    middle = nn.Tanh() if middle is None else middle
    return nn.Sequential(
        nn.Sequential(first(2, 4), middle), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def conv4(norm="batch"):
    torch.manual_seed(0)
    return mg.models.Conv4(3, hidden=4, image_size=16, norm=norm).double()


def maml_of(model, adapt, loss_fn=F.mse_loss, **options):
    return mg.MAML(model, loss_fn, inner=rules.sgd(lr=0.3), **{"steps": 2, **options}, adapt=adapt)


def agree(maml, batch, expected, **tolerances):
    out = maml(batch)
    tolerances = {"rtol": 1e-9, "atol": 1e-12, **tolerances}
    torch.testing.assert_close(out.query_losses, expected, **tolerances)
    variables = list(maml.parameters())
    found, wanted = (
        torch.autograd.grad(value, variables, retain_graph=True, allow_unused=True)
        for value in (out.loss, expected.mean())
    )
    torch.testing.assert_close(found, wanted, **tolerances)
    return out


CHAINS = {
    "chain": (chain, "3", ["3.weight", "3.bias"]),
    "nested": (chain, "1.weight", ["1.weight"]),
    "declared": (lambda: chain(Counted), "3", ["3.weight", "3.bias"]),
    "group norm": (lambda: chain(middle=nn.GroupNorm(2, 4)), "3", ["3.weight", "3.bias"]),
    "batch norm": (
        lambda: chain(middle=nn.BatchNorm1d(4, track_running_stats=False)),
        "3",
        ["3.weight", "3.bias"],
    ),
    "dropout that is off": (lambda: chain(middle=nn.Dropout(0.5)).eval(), "3", ["3.weight", "3.bias"]),
    "tied": (lambda: tied(), "3", ["3.weight", "3.bias"]),
}


def tied():
    model = chain()
    model.append(nn.Tanh())
    model.append(nn.Linear(3, 4).double())
    model.append(model[1])
    return model


@pytest.mark.parametrize(
    ("task_chunk", "memory", "order"),
    [
        (None, "full", 2),
        slow(1, "full", 1),
        slow(None, "step", 2),
        slow(1, "step", 2),
        slow(3, "sqrt", 1),
        slow(None, "64KiB", 2),
    ],
)
@pytest.mark.parametrize("case", CHAINS)
def test_the_gradient_is_that_of_a_plain_loop(textbook, regression, case, task_chunk, memory, order):
    make, adapt, names = CHAINS[case]
    model = make()
    assert split_layers(model, {id(p) for name, p in model.named_parameters() if name in names}) is not None
    if case == "tied":
        regression = Batch(
            *(Examples(part.x, torch.cat([part.y, part.y[..., :1]], -1)) for part in regression)
        )
    maml = maml_of(model, adapt, order=order, memory=memory, task_chunk=task_chunk)
    expected = textbook(model, F.mse_loss, regression, lr=0.3, steps=2, order=order, names=names)
    out = agree(maml, regression, expected)
    if memory == "full":
        torch.testing.assert_close(maml.adapt(regression.support)(regression.query.x), out.query_outputs)


@pytest.mark.parametrize(
    ("norm", "adapt", "task_chunk"),
    combined(
        ["batch", "group"],
        ["head", "blocks.3"],
        [None, 1],
        fast=lambda norm, adapt, chunk: norm == "batch" and not chunk,
    ),
)
def test_convolutions(textbook, images, norm, adapt, task_chunk):
    model = conv4(norm)
    maml = maml_of(model, adapt, F.cross_entropy, task_chunk=task_chunk)
    names = [name for name, _ in model.named_parameters() if name.startswith(adapt)]
    expected = textbook(model, F.cross_entropy, images, lr=0.3, steps=2, names=names)
    agree(maml, images, expected, rtol=1e-8)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_features_are_computed_once(regression, task_chunk):
    maml = maml_of(chain(Counted), "3", steps=5, task_chunk=task_chunk)
    maml(regression)
    Counted.calls = 0
    maml(regression)
    assert Counted.calls == (2 if task_chunk is None else 2 * 4)


class Writes(nn.Linear):
    """A layer that adapts, and writes into its input."""

    def forward(self, x):
        return super().forward(x.mul_(2.0))


NOT_SHARED = {
    "dropout": lambda: chain(middle=nn.Dropout(0.5)),
    "running statistics": lambda: chain(middle=nn.BatchNorm1d(4)),
    "undeclared": lambda: chain(Undeclared),
    "hook": lambda: hooked(chain()),
    "hook within": lambda: hooked(chain(), 0),
    "parametrized": lambda: parametrized(chain()),
    "tied to what adapts": lambda: tied_to_the_head(),
    "no chain": lambda: nn.Sequential(),
}


def hooked(model, *path):
    for place in path:
        model = model[place]
    module = model if not path else model[0]
    module.register_forward_hook(lambda module, args, output: output)
    return model


def parametrized(model):
    nn.utils.parametrizations.orthogonal(model[0][0])
    return model


def tied_to_the_head():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[0].weight = model[2].weight
    return model


@pytest.mark.parametrize("case", NOT_SHARED)
def test_what_may_do_something_else_each_time_is_not_shared(case):
    model = NOT_SHARED[case]()
    adapted = list(model.parameters())[0 if case.startswith("tied") else -2 :]
    split = split_layers(model, set(map(id, adapted)))
    shared = () if split is None else split.shared
    assert len(shared) <= (1 if case in ("dropout", "running statistics") else 0)


def test_layers_that_write_into_their_input_get_a_copy(textbook, regression):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), Writes(4, 3)).double()
    expected = textbook(model, F.mse_loss, regression, lr=0.3, steps=2, names=["1.weight", "1.bias"])
    for task_chunk in (None, 1):
        agree(maml_of(model, "1", task_chunk=task_chunk), regression, expected)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_features_that_are_not_finite_concern_their_task(textbook, regression, task_chunk):
    x = regression.support.x.clone()
    x[2, 1] = float("inf")
    batch = Batch(Examples(x, regression.support.y), regression.query)
    model = chain()
    with pytest.raises(FloatingPointError, match="the loss of task 2 is nan at inner step 0"):
        maml_of(model, "3", task_chunk=task_chunk)(batch)
    out = maml_of(model, "3", task_chunk=task_chunk, nonfinite="skip")(batch)
    kept = torch.tensor([0, 1, 3])
    others = Batch(*(Examples(part.x[kept], part.y[kept]) for part in regression))
    expected = textbook(model, F.mse_loss, others, lr=0.3, steps=2, names=["3.weight", "3.bias"]).mean()
    torch.testing.assert_close(out.loss, expected, rtol=1e-9, atol=1e-12)
    variables = list(model.parameters())
    found, wanted = (torch.autograd.grad(value, variables) for value in (out.loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_layer_may_cease_to_be_a_function(textbook, regression):
    model = chain(middle=nn.Dropout(0.5)).eval()
    maml = maml_of(model, "3")
    quiet = maml(regression).loss.item()
    assert quiet == maml(regression).loss.item()
    model.train()
    assert maml(regression).loss.item() != maml(regression).loss.item()


def test_convolutions_whose_weights_are_shared_do_not_keep_tasks_apart(images):
    model = conv4()
    maml = maml_of(model, "head", F.cross_entropy)
    maml(images)
    assert maml._cache.stacking.vmap_ran
    maml.adapted = None
    maml._cache.stacking.vmap_ran = False
    maml(images)
    assert maml._cache.stacking.vmap_ran == (images.support.x.device.type != "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["full", "step"])
def test_the_graphs_of_the_body_are_not_kept_for_every_step(memory):
    """Bytes of a meta-batch with ten steps beside those with one."""
    model, peaks = conv4(), []
    draw = torch.randn(4, 6, 1, 16, 16, dtype=torch.float64)
    batch = Batch(Examples(draw, torch.arange(3).repeat(4, 2)), Examples(draw, torch.arange(3).repeat(4, 2)))
    for steps in (1, 10):
        maml = maml_of(model, "head", F.cross_entropy, steps=steps, memory=memory)
        maml(batch).loss.backward()
        with mg.MemoryTracker() as memory_tracker:
            maml(batch).loss.backward()
        peaks.append(max(record.peak for record in memory_tracker.records()))
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("policy", ["transductive", "support", "running"])
@pytest.mark.parametrize("task_chunk", [None, 1])
def test_norms_that_follow_a_policy(monkeypatch, regression, policy, task_chunk):
    """What is shared before them leaves everything as it is without sharing, the running statistics too."""
    found = []
    for is_shared in (True, False):
        norm = nn.BatchNorm1d(4, track_running_stats=policy != "support")
        model = nn.Sequential(
            nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 3)
        ).double()
        model.load_state_dict({**model.state_dict(), **seeded(model)})
        if not is_shared:
            monkeypatch.setattr("metagrad.meta.execution.executor.split_layers", lambda *args: None)
        maml = maml_of(model, "5", norm=policy, task_chunk=task_chunk)
        loss = maml(regression).loss
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters())), *model.buffers()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def seeded(model):
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in model.named_parameters()
    }
