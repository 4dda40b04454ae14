"""A compiled MAML equals an eager one in float64 with every checkpointing policy, or falls back with one warning.

The backend traces derivatives as inductor does, and runs their operations with torch.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim import rules
from tests.marks import slow
from tests.meta.textbook import Scaled, assert_close, gradients, net

TRACED = {"backend": "aot_eager"}


class Normed(nn.Sequential):
    """A model with norms whose second derivatives are incorrect in torch.func."""

    def __init__(self):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, track_running_stats=False)
        super().__init__(nn.Linear(2, 4), norm, nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))
        self.double()


def learned_rate():
    return nn.Parameter(torch.tensor(0.1, dtype=torch.float64))


def weighted(out):
    weights = torch.arange(1, len(out.query_losses) + 1)
    return (out.query_losses * weights).sum() + out.support_losses.sum()


CASES = {
    "one function": {"steps": 2},
    "norms": {"steps": 2, "model": Normed},
    "learned parts": {
        "steps": 2,
        "adapt": "2",
        "inner": lambda: rules.sgd(lr=learned_rate(), momentum=0.9),
        "loss_fn": Scaled,
    },
    "steps": {"steps": 6},
    "step": {"steps": 3, "memory": "step"},
    "sqrt": {"steps": 6, "memory": "sqrt"},
    "budget": {"steps": 6, "memory": "20KiB"},
    "norms, step": {"steps": 2, "model": Normed, "memory": "step"},
    "first order": {"steps": 2, "order": 1},
    "truncate": {"steps": 6, "truncate": 2},
    "tolerance": {"steps": 3, "tolerance": 0.5},
}


def pair(case, options=TRACED):
    """A compiled MAML and an eager one."""
    given = {"inner": lambda: rules.sgd(lr=0.1), "model": net, "loss_fn": lambda: F.mse_loss, **case}
    calls = {name: given.pop(name) for name in ("inner", "model", "loss_fn")}
    return [
        mg.MAML(calls["model"](), calls["loss_fn"](), inner=calls["inner"](), compile=compile, **given)
        for compile in (options, False)
    ]


def results_of(maml, batch, objective=lambda out: out.loss, *, second=False):
    out = maml(batch)
    grads = torch.autograd.grad(objective(out), list(maml.parameters()), create_graph=second)
    if second:
        grads = torch.autograd.grad(sum(g.square().sum() for g in grads), list(maml.parameters()))
    return [out.loss.detach(), out.support_losses.detach(), out.query_outputs.detach(), *grads]


def assert_same(compiled, eager, *args, **kwargs):
    torch.testing.assert_close(
        results_of(compiled, *args, **kwargs), results_of(eager, *args, **kwargs), rtol=1e-9, atol=1e-11
    )


FAST = ("one function", "norms, step")


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in CASES])
def test_compiled_is_eager(regression, name):
    """All calls use the same compiled functions. Other objectives are computed again by steps."""
    compiled, eager = pair(CASES[name])
    for _ in range(2):
        assert_same(compiled, eager, regression)
    if name in ("one function", "steps", "step", "sqrt"):
        assert_same(compiled, eager, regression, weighted)
        assert_same(compiled, eager, regression)
    if name in ("one function", "steps", "step"):
        assert_same(compiled, eager, regression, second=True)


@pytest.mark.slow
def test_weighted_query_losses_of_steps_are_eager(regression):
    compiled, eager = (
        mg.MAMLPlusPlus(net(), F.mse_loss, steps=3, norm=None, query_weights=[0.2, 0.3, 0.5], compile=compile)
        for compile in (TRACED, False)
    )
    assert_same(compiled, eager, regression)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one function", "step"])
def test_inductor_is_eager(regression, name):
    assert_same(*pair(CASES[name], True), regression)


@pytest.mark.slow
def test_a_learned_tensor_that_the_loss_closes_over_has_its_gradient(regression):
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    pair_of = pair({"steps": 2, "loss_fn": lambda: lambda p, y: F.mse_loss(p * scale, y)})
    losses = [(maml, maml(regression).loss) for maml in pair_of]
    assert_close(*(gradients(loss, [scale, *maml.parameters()]) for maml, loss in losses))


def test_changes_between_calls_are_seen(regression):
    inner = lambda: rules.sgd(lr=learned_rate())  # noqa: E731
    compiled, eager = pair({"steps": 1, "inner": inner}, {"backend": "eager"})
    assert_same(compiled, eager, regression)
    few = mg.tasks.Batch(*(mg.tasks.Examples(part.x[:2, 1:], part.y[:2, 1:]) for part in regression))
    assert_same(compiled, eager, few)
    for maml in (compiled, eager):
        maml.inner_lr = nn.Parameter(3 * maml.inner_lr.detach())
    assert_same(compiled, eager, regression)
    compiled.inner = eager.inner = rules.sgd(lr=0.2)
    for maml in (compiled, eager):
        maml.model[1] = nn.Sequential(nn.Dropout(0.5).eval(), nn.Sigmoid())
        with torch.no_grad():
            maml.model[0].weight.mul_(2.0)
    assert_same(compiled, eager, regression)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.linear.register_forward_hook(lambda module, args, output: 2 * output)
        self.double()

    def forward(self, x):
        return self.linear(x)


class Branching(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if float(y.detach().sum()) > 1e9 else 2 * y


UNCOMPILED = {
    "hooks": ({"model": Hooked}, "has hooks or a forward of its own"),
    "control flow": ({"model": lambda: Branching(2, 3).double()}, "torch.compile cannot take it"),
    "running statistics": (
        {"model": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()},
        "updates running statistics",
    ),
    "norm": (
        {"model": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double(), "norm": "transductive"},
        "norm= exchanges the normalizations",
    ),
}


@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_compiled_runs_eagerly_with_one_warning(regression, name):
    case, reason = UNCOMPILED[name]
    torch.manual_seed(0)
    maml = pair({"steps": 2, "task_chunk": 1, **case})[0]
    eager = copy.deepcopy(maml).keeping("full")
    with pytest.warns(UserWarning, match=f"runs without being compiled, because .*{reason}"):
        found = results_of(maml, regression)
    torch.testing.assert_close(found, results_of(eager, regression), rtol=1e-9, atol=1e-11)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results_of(maml, regression)


def test_a_model_that_changes_before_the_backward_pass_is_refused(regression):
    """The steps run again there, and would compute the derivative of another function."""
    model = nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(0.1), nn.Linear(4, 3)).double()
    maml = pair({**CASES["step"], "model": lambda: model}, {"backend": "eager"})[0]
    for change in (lambda: setattr(model[1], "negative_slope", 0.5), maml.eval):
        loss = maml(regression).loss
        change()
        with pytest.raises(RuntimeError, match="a number of a module changed before the backward pass"):
            loss.backward()
        model[1].negative_slope = 0.1


def test_adaptation_without_grad_mode_is_compiled(regression):
    compiled, eager = pair({**CASES["steps"], "steps": 2})
    with torch.no_grad():
        a, b = (maml.adapt(regression.support)(regression.query.x) for maml in (compiled, eager))
    torch.testing.assert_close(a, b)
