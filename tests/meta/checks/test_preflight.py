import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import metagrad as mg
from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.optim import rules
from tests.functions import custom_function
from tests.meta.textbook import Graph

Detached = custom_function(torch.square, lambda x: 2 * x.detach())  # treats the input as a constant
Wrong = custom_function(lambda x: x**3, lambda x: 2 * x**2)


class Once(Wrong):
    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0] ** 2


class Raising(Wrong):
    """A gradient that cannot be differentiated, and is not in the table of defects."""

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise KeyError("no second derivative here")
        return 3 * gradient * ctx.saved_tensors[0] ** 2


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(1))[0][:, -1])


def chain(*middle):
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 2))


def plain(examples=6):
    return torch.randn(examples, 4), torch.randn(examples, 2)


def meta_batch(tasks=3):
    return tuple((torch.randn(tasks, 5, 4), torch.randn(tasks, 5, 2)) for _ in range(2))


def seen(report):
    return [(f.module, f.kind, f.status, f.order) for f in report.findings]


def test_a_smooth_network_has_no_finding():
    report = mg.preflight(chain(nn.Tanh()), F.mse_loss, plain(), order=3)
    assert report.ok
    assert not report.findings
    assert not report.notes
    assert list(report.memory) == ["order 1", "order 2", "order 3"]
    report.raise_for_errors()
    assert "No problems found." in str(report)


class Between(nn.Module):
    """A model with a function between its modules."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(Detached.apply(self.first(x)))


class Branches(nn.Module):
    """A large branch and a small branch with a defect."""

    def __init__(self):
        super().__init__()
        self.large = nn.Sequential(nn.Linear(4, 99), nn.Tanh(), nn.Linear(99, 99), nn.Linear(99, 2))
        self.small = nn.Sequential(nn.Linear(4, 2), Applied(Detached), nn.Linear(2, 2))

    def forward(self, x):
        return self.large(x) + 0.01 * self.small(x)


class Rounded(nn.Module):
    def forward(self, x):
        return x + (x.round() - x).detach()


def applied(function):
    return nn.Sequential(nn.Linear(4, 4), chain(nn.Sequential(nn.Tanh(), Applied(function))))


def wrong_loss(prediction, target):
    return Detached.apply(prediction - target).mean()


DEFECTS = {
    "a constant gradient": (lambda: applied(Detached), F.mse_loss, ("1.1.1", "Applied", "wrong", 2)),
    "a wrong gradient": (lambda: applied(Wrong), F.mse_loss, ("1.1.1", "Applied", "wrong", 1)),
    "once differentiable": (lambda: applied(Once), F.mse_loss, ("1.1.1", "Applied", "wrong", 2)),
    "a gradient that raises": (lambda: applied(Raising), F.mse_loss, ("1.1.1", "Applied", "missing", 2)),
    "between modules": (Between, F.mse_loss, ("", "Between", "wrong", 2)),
    "beside many parameters": (Branches, F.mse_loss, ("small.1", "Applied", "wrong", 2)),
    "the loss": (lambda: chain(nn.Tanh()), wrong_loss, ("loss_fn(...)", "wrong_loss", "wrong", 2)),
    "straight through": (lambda: chain(Rounded()), F.mse_loss, ("1", "Rounded", "wrong", 1)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found_and_its_module_named(name):
    model, loss_fn, expected = DEFECTS[name]
    report = mg.preflight(model(), loss_fn, plain())
    assert seen(report) == [expected]
    assert name != "straight through" or "straight-through" in report.findings[0].suggestion
    assert not report.ok
    with pytest.raises(MissingDerivative, match=rf"preflight: .*order {expected[-1]}"):
        report.raise_for_errors()


def test_a_defect_behind_a_known_one_is_found():
    report = mg.preflight(chain(Applied(Once), Applied(Detached)), F.mse_loss, plain())
    assert {(f.module, f.status) for f in report.findings} == {("1", "wrong"), ("2", "wrong")}


def test_only_orders_up_to_the_given_one_are_checked():
    assert mg.preflight(chain(Applied(Detached)), F.mse_loss, plain(), order=1).ok
    model = chain(nn.LayerNorm(4), nn.Tanh())
    assert mg.preflight(model, F.mse_loss, plain()).ok
    assert seen(mg.preflight(model, F.mse_loss, plain(), order=3)) == [("1", "LayerNorm", "wrong", 3)]


def test_kinks_and_zeros_raise_no_alarm():
    convolutions = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU()
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(36, 3))
    nn.init.zeros_(list(model.parameters())[-2])
    images = torch.randn(6, 1, 12, 12).clamp_min(0.5).sub(0.5)  # many pixels are zero
    report = mg.preflight(model, F.cross_entropy, (images, torch.arange(6) % 3), order=3)
    assert not report.findings


def test_a_connection_that_is_zero_at_first_hides_nothing():
    model = chain(Applied(Detached))
    nn.init.zeros_(list(model.parameters())[-2])
    assert not mg.preflight(model, F.mse_loss, plain()).ok


def test_what_float64_does_not_reach_is_a_note():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.float()).float()

    report = mg.preflight(nn.Sequential(Fixed(4, 2)), F.mse_loss, plain())
    assert "cannot be computed in float64" in report.notes[0]


class Counting(nn.Linear):
    """A layer that changes a buffer and an attribute at each call."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.total += 1
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("batch", [plain, meta_batch], ids=["plain", "meta"])
def test_nothing_is_left_behind(batch):
    model = nn.Sequential(Counting(), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.LayerNorm(4), nn.Linear(4, 2))
    model[4].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model)
    generator, versions = torch.get_rng_state(), [p._version for p in model.parameters()]
    options = {"inner": rules.sgd(lr=0.1), "steps": 1} if batch is meta_batch else {}
    given = batch()
    torch.set_rng_state(generator)
    mg.preflight(model, F.mse_loss, given, order=3, **options)
    assert torch.equal(torch.get_rng_state(), generator)
    assert versions == [p._version for p in model.parameters()]
    assert model[0].calls == 0
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in before.parameters()]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0.0, atol=0.0)
    torch.testing.assert_close(model[0].weight.grad, torch.ones(4, 4))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_looks_in_grad_mode(mode):
    model, batch = chain(Applied(Detached)), plain()
    with mode():
        assert not mg.preflight(model, F.mse_loss, batch).ok


SGD = {"inner": rules.sgd(lr=0.1)}


WRONG_INPUTS = [
    (lambda: (F.mse_loss, chain(), plain()), {}, "expected Module, got function"),
    (lambda: (chain(), plain()), {}, "batch is missing"),
    (lambda: (chain(), F.mse_loss, plain()), {"order": 4}, "order.: expected one of 1, 2, 3, got 4"),
    (lambda: (chain(), F.mse_loss, meta_batch()), {"steps": 3}, "inner and steps go together"),
    (lambda: (chain(), F.mse_loss, plain()), {"steps": 3} | SGD, "go together.* and plain data"),
    (lambda: (chain().requires_grad_(False), F.mse_loss, plain()), {}, "depends on no parameter"),
    (lambda: (chain(), F.mse_loss, torch.ones(3)), {}, r"must be a pair \(x, y\)"),
    (lambda: (chain(), torch.sub, plain()), {}, "must return a scalar for each task, got shape"),
    (lambda: (chain(), lambda *_: None, plain()), {}, "expected a tensor from loss_fn, got 'NoneType'"),
    (lambda: (chain(), lambda p, y: p.detach().mean(), plain()), {}, "depends on no parameter"),
]


def test_bad_input_is_named():
    for arguments, options, message in WRONG_INPUTS:
        with pytest.raises((TypeError, ValueError), match=f"^preflight.*{message}"):
            mg.preflight(*arguments(), **options)


def test_an_algorithm_of_ones_own_gets_what_the_protocol_says():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def adapt(self, support, *, steps=None):
            raise NotImplementedError

        def forward(self, batch, *, steps=None):
            means = self.scale * batch.support.y.mean(1, keepdim=True)
            losses = (means - batch.query.y).square().flatten(1).mean(1)
            return mg.meta.MetaOutput(losses.mean(), losses, means, losses[:, None], losses, losses > 0)

    support, query = (SimpleNamespace(x=x, y=y) for x, y in meta_batch())
    assert mg.preflight(Mean(), SimpleNamespace(support=support, query=query)).ok


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else 2 * x


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Recurrent, "no rule for LSTM"), (lambda: chain(Branching()), "torch.vmap cannot take the model")],
)
def test_what_vmap_does_not_take_is_told(model, reason):
    report = mg.preflight(model(), F.mse_loss, meta_batch(), inner=rules.sgd(lr=0.1), steps=1)
    (finding,) = report.findings
    assert report.ok
    assert finding.status == "slower"
    assert reason in finding.reason
    assert "task_chunk=1" in finding.reason


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_is_what_maml_takes(order):
    maml = mg.MAML(chain(nn.Tanh()), F.mse_loss, inner=rules.sgd(lr=0.1), steps=0, order=order)
    assert mg.preflight(maml, meta_batch()).order == order


def test_a_model_of_a_fixed_number_of_examples_is_checked_on_all_of_them():
    assert mg.preflight(Graph(5, 4, 2), F.mse_loss, plain(5)).ok
    assert mg.preflight(Graph(5, 4, 2), F.mse_loss, meta_batch(), inner=rules.sgd(lr=0.1), steps=4).notes == (
        "the memory was extrapolated from 3 steps.",
    )


def test_other_algorithms_are_examined_by_their_own_loss():
    labels = (torch.arange(10) % 5).repeat(3, 1)
    batch = tuple((torch.randn(3, 10, 4), labels) for _ in range(2))
    assert not mg.preflight(mg.ProtoNet(chain(nn.Tanh()), F.cross_entropy), batch).findings
    embedding = nn.Sequential(nn.Linear(4, 8), Applied(Wrong), nn.Linear(8, 6))
    report = mg.preflight(mg.ProtoNet(embedding, F.cross_entropy, task_chunk=1), batch)
    assert seen(report) == [("model.1", "Applied", "wrong", 1)]
    assert list(report.memory) == ["order 1"]


def tracked(maml, batch):
    """Return the memory of the third training step."""
    for _ in range(2):
        maml(batch).loss.backward()
    maml.zero_grad()
    with mg.MemoryTracker("cpu") as mem:
        with mem.phase("forward"):
            loss = maml(batch).loss
        loss.backward()
    return mem.records()[0].after, mem.peak


@pytest.mark.parametrize("steps", [1, 7])
def test_the_table_is_what_a_tracked_step_takes(steps):
    model, batch = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)), meta_batch()
    arguments = {"inner": rules.adam(0.01), "steps": steps}
    memory = mg.preflight(model, F.mse_loss, batch, **arguments).memory
    assert list(memory) == ["full", "step"]
    for mode, cost in memory.items():
        expected = tracked(mg.MAML(model, F.mse_loss, memory=mode, **arguments), batch)
        assert tuple(cost) == pytest.approx(expected, rel=0.1)


def test_plain_data_has_a_row_for_each_order():
    model, (x, y) = chain(nn.Tanh()), plain(50)
    memory = mg.preflight(model, F.mse_loss, (x, y)).memory
    with mg.MemoryTracker("cpu") as mem:
        F.mse_loss(model(x), y).backward()
    assert memory["order 1"].peak == pytest.approx(mem.peak, rel=0.1)
    assert memory["order 2"].peak > memory["order 1"].peak
