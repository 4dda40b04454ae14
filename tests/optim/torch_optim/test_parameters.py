"""Parameters of all kinds and their groups, and descent."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.optim import AdaHessian
from tests.optim.torch_optim.cases import (
    assert_equal,
    batch,
    classification,
    closure_of,
    every,
    every_one,
    having,
    lacking,
    layer,
    network,
    optimizer,
    quadratic,
    rosenbrock,
    run,
    snapshot,
    steps_of,
    values_of,
    warning_of_modules,
)

rules = lacking("one vector")


WRONG_PARAMS = [
    (torch.ones(2), "Tensor"),
    ({"weight": torch.ones(2)}, "dict"),
    (["weight"], "str in a list"),
    ([{"params": ["weight"]}], "str in a list"),
    ([{"lr": 0.1}], "dict in a list"),
    (nn.Identity(), "Identity"),
    ([1], "int in a list"),
]


def layers(*rows):
    """Make layers, and the model that they are."""
    made = [layer(*row) for row in rows]
    return nn.ModuleList(made), *made


@every
def test_an_unused_parameter_stays(case):
    model, used, unused = layers((1.0, 2.0), (3.0, 4.0))
    opt = optimizer(case, model)
    assert opt.step() is None
    assert values_of(used) == [1.0, 2.0]
    run(opt, lambda: quadratic(used), 3)
    assert values_of(unused) == [3.0, 4.0]
    assert unused.weight not in opt.state
    assert values_of(used) != [1.0, 2.0]


@every
def test_a_parameter_that_is_used_later_begins_then(case):
    model, first, second = layers((1.0, 2.0), (3.0, 4.0))
    opt = optimizer(case, model)
    run(opt, lambda: quadratic(first), 4)
    run(opt, lambda: quadratic(first) + quadratic(second), 1)
    assert opt.state[first.weight]["step"] == (1 if "one vector" in case.traits else 5)
    assert opt.state[second.weight]["step"] == 1
    assert values_of(second) != [3.0, 4.0]
    assert second.weight.isfinite().all()


@every
def test_a_parameter_without_curvature(case):
    """The Hessian of a linear loss is zero, and has no graph."""
    model, curved, linear = layers((2.0, 2.0), (1.0, 1.0))
    opt = optimizer(case, model, lr=1e-4)
    eye = torch.eye(2)
    run(opt, lambda: quadratic(curved) + F.mse_loss(linear(eye), torch.zeros(2, 1), reduction="sum"), 1)
    before = values_of(linear)
    run(opt, lambda: quadratic(curved) + linear(eye).sum(), 3)
    assert linear.weight.isfinite().all()
    assert all(new < old for new, old in zip(values_of(linear), before, strict=True))


class Scaled(nn.Module):
    """A layer, times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer(1.0, 2.0)
        self.scalar = nn.Parameter(torch.tensor(3.0))

    def forward(self) -> torch.Tensor:
        return self.scalar * self.layer(torch.eye(2))


@lacking("matrices")
def test_a_scalar_parameter(case):
    model = Scaled()
    with warning_of_modules(case):
        opt = optimizer(case, model, lr=0.1)
    losses = run(opt, lambda: F.mse_loss(model(), torch.ones(2, 1)), steps_of(case, 30))
    assert losses[-1] < losses[0]
    assert model.scalar.shape == ()
    assert model.scalar != 3


def convolutional():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 2), nn.Flatten(), nn.Linear(4, 3))


@lacking("matrices")
def test_conv1d_and_a_bias(case):
    model = convolutional()
    x, y = batch()
    opt = optimizer(case, model)
    losses = run(opt, lambda: F.cross_entropy(model(x.unsqueeze(1)), y), steps_of(case, 15))
    assert min(losses) < 0.9 * losses[0]


@lacking("one vector")
def test_two_dtypes_in_a_group(case):
    model, one, other = layers((1.0, 3.0), (1.0, 3.0))
    other.double()
    opt = optimizer(case, model)
    losses = run(opt, lambda: quadratic(one) + quadratic(other), 3)
    assert losses[-1] < losses[0]
    assert (one.weight.dtype, other.weight.dtype) == (torch.float32, torch.float64)


@having("one vector")
def test_two_dtypes_in_a_group_are_refused(case):
    model, one, other = layers((1.0, 3.0), (1.0, 3.0))
    other.double()
    for params in (None, [{"params": [each.weight]} for each in (one, other)]):
        with pytest.raises(ValueError, match=r"all parameters make one vector.*float64"):
            optimizer(case, model, params)


@every
def test_values_of_a_group_of_its_own(case):
    model, still, moving = layers((2.0, 2.0), (2.0, 2.0))
    own = [{"params": []}, {"params": [still.weight], "lr": 0.0}, {"params": [moving.weight]}]
    opt = optimizer(case, model, own)
    run(opt, lambda: quadratic(still) + quadratic(moving), 3)
    assert values_of(still) == [2.0, 2.0]
    assert values_of(moving) != [2.0, 2.0]


@every
def test_a_group_that_is_added_later(case):
    model, early, late = layers((2.0, 2.0), (2.0, 2.0))
    opt = optimizer(case, model, [{"params": [early.weight]}])
    run(opt, lambda: quadratic(early) + quadratic(late), 2)
    assert values_of(late) == [2.0, 2.0]
    opt.add_param_group({"params": late.weight, "lr": 0.01})
    run(opt, lambda: quadratic(early) + quadratic(late), 2)
    assert opt.state[late.weight]["step"] == 2
    assert values_of(late) != [2.0, 2.0]


@every
def test_parameters_and_forms_that_are_refused(case):
    model = layer(1.0, 2.0)
    with pytest.raises(TypeError, match=r"lr must be a number or a 0-d tensor, got list.*scheduler"):
        case.of(model, lr=[0.1, 0.2])
    with pytest.raises(ValueError, match=r"lr: expected one element, got \(2,\)"):
        case.of(model, lr=torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        case.of(nn.Identity())
    for wrong, kind in WRONG_PARAMS:
        with pytest.raises(TypeError, match=rf"^\w+\(params\): expected parameters.*got {kind}"):
            case.of(model, wrong)
    opt = optimizer(case, model, [{"params": [model.weight]}])
    with pytest.raises(ValueError, match="lr must be at least 0"):
        opt.add_param_group({"params": [layer(1.0).weight], "lr": -1.0})
    assert len(opt.param_groups) == 1
    model.weight = nn.Parameter(torch.ones(1, 1).expand(3, 2))
    with pytest.raises(ValueError, match=rf"{case.name}\(params\): elements of 'weight' share memory"):
        case.of(model, model.named_parameters())
    spectrum = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    with pytest.raises(TypeError, match=rf"{case.name}\((params|model)\): 'weight' is torch.complex64.*real"):
        case.of(spectrum, spectrum.named_parameters())
    lazy = nn.LazyLinear(1, bias=False)
    with pytest.raises(ValueError, match=rf"{case.name}\(\w+\): 'weight' belongs to a lazy module"):
        case.of(lazy, lazy.named_parameters())


@every
def test_two_parameters_of_one_name_both_move(case):
    """As of two models, whose named parameters are trained together."""
    model, other = network(), network()
    opt = optimizer(case, model, [("weight", p) for p in model.parameters()])
    expected = optimizer(case, other)
    run(opt, classification(model), 2)
    run(expected, classification(other), 2)
    assert_equal(snapshot(model), snapshot(other))


@every
def test_frozen_parameters_stay(case):
    model = network()
    model.first.weight.requires_grad_(False)
    before = snapshot(model)
    run(optimizer(case, model), classification(model), 2)
    assert torch.equal(model.first.weight, before[0])
    assert not torch.equal(model.second.weight, before[1])


NO_NUMBERS = {"step", "seed", "differentiable"}  # of the shell, and of torch


@every
def test_negative_hyperparameters_are_refused(case):
    model = layer(1.0, 2.0)
    defaults = case.of(model).defaults
    names = [name for name, value in defaults.items() if value is None or type(value) in (int, float)]
    assert "lr" in names
    for name in set(names) - NO_NUMBERS:
        for refused in (-1.0, torch.tensor(-1.0)):
            with pytest.raises(ValueError, match=rf"\b{name}\b.*, got (tensor\()?-1"):
                case.of(model, **{name: refused})
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            case.of(model, [{"params": [model.weight], name: -1.0}])


@every
def test_a_tensor_as_lr_is_read_at_every_step(case):
    model, twin = layer(2.0, 2.0), layer(2.0, 2.0)
    lr = torch.tensor(0.1, dtype=torch.float64)
    opt, other = optimizer(case, model, lr=lr), optimizer(case, twin, lr=0.1)
    run(opt, lambda: quadratic(model), 1)
    run(other, lambda: quadratic(twin), 1)
    assert values_of(model) == values_of(twin) != [2.0, 2.0]
    lr.fill_(0.0)
    run(opt, lambda: quadratic(model), 1)
    assert values_of(model) == values_of(twin)


def test_options_of_the_paper_reach_the_rule():
    """A public implementation ignores its number of samples."""
    w = torch.zeros(3, requires_grad=True)
    mixing = torch.tensor([[2.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 2.0]])
    squares = []
    for samples in (1, 1024):
        opt = AdaHessian([w], lr=0.0, samples=samples, seed=3)
        opt.step(closure_of(opt, lambda: (w + 1) @ mixing @ (w + 1) / 2))
        squares.append(opt.state[w]["square"] * 1000)
    assert (squares[0] - 4).abs().max() > 3  # a row sum is 0 or 4, squared: 0 or 16
    torch.testing.assert_close(squares[1], torch.full((3,), 4.0), rtol=0.3, atol=0)


@rules
def test_a_parameter_without_elements(case):
    model, used, empty = layers((1.0, 2.0), ())
    opt = optimizer(case, model)
    losses = run(opt, lambda: quadratic(used) + empty.weight.sum(), 4)
    assert losses[-1] < losses[0]
    twin, alone, _ = layers((1.0, 2.0), ())
    run(optimizer(case, twin), lambda: quadratic(alone), 4)
    assert values_of(used) == values_of(alone)
    assert empty.weight.shape == (1, 0)


# Descent


@every_one
def test_on_a_network(case):
    model = network()
    losses = run(optimizer(case, model), classification(model), steps_of(case, 40))
    assert losses[-1] < 0.75 * losses[0]


@every_one
def test_at_its_defaults_no_optimizer_climbs(case):
    model = layer(-1.2, 1.0)
    losses = run(case.of(model), lambda: rosenbrock(model), steps_of(case, 50))
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
