"""Parameters of all kinds, and their groups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.optim.shells.adahessian import AdaHessian
from metagrad.optim.shells.first_order import Lion, Muon
from tests.optim.shells.cases import (
    batch,
    classification,
    closure_of,
    every,
    every_elementwise,
    network,
    optimizer,
    quadratic,
    run,
    snapshot,
)


def matrix(*values):
    return torch.tensor([values], requires_grad=True)


@every
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_unused_parameter_stays(case, set_to_none):
    used, unused = matrix(1.0, 2.0), matrix(3.0, 4.0)
    opt = optimizer(case, [used, unused])

    def closure():
        opt.zero_grad(set_to_none=set_to_none)
        loss = quadratic(used)
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert unused.tolist() == [[3.0, 4.0]]
    assert unused not in opt.state
    assert used.tolist() != [[1.0, 2.0]]


@every
def test_a_parameter_that_is_used_later_begins_then(case):
    first, second = matrix(1.0, 2.0), matrix(3.0, 4.0)
    opt = optimizer(case, [first, second])
    run(opt, lambda: quadratic(first), 4)
    run(opt, lambda: quadratic(first) + quadratic(second), 1)
    assert opt.state[first]["step"] == 5
    assert opt.state[second]["step"] == 1
    assert second.tolist() != [[3.0, 4.0]]
    assert second.isfinite().all()


@every
def test_a_parameter_without_curvature(case):
    """The Hessian of a linear loss is zero, and has no graph."""
    w, linear = matrix(2.0, 2.0), matrix(1.0, 1.0)
    opt = optimizer(case, [w, linear], lr=1e-4)
    run(opt, lambda: quadratic(w) + F.mse_loss(linear, linear.detach() - 1, reduction="sum"), 1)
    run(opt, lambda: quadratic(w) + linear.sum(), 3)
    assert linear.isfinite().all()
    assert (linear != 1).all()


@every_elementwise
def test_a_scalar_parameter(case):
    scalar = torch.tensor(3.0, requires_grad=True)
    opt = optimizer(case, [scalar], lr=0.1)
    losses = run(opt, lambda: F.mse_loss(scalar, torch.tensor(1.0)), 30)
    assert losses[-1] < losses[0]
    assert scalar.shape == ()


@every_elementwise
def test_conv1d_and_a_bias(case):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 2), nn.Flatten(), nn.Linear(4, 3)
        )
    x, y = batch()
    losses = run(optimizer(case, model.parameters()), lambda: F.cross_entropy(model(x.unsqueeze(1)), y), 40)
    assert losses[-1] < 0.9 * losses[0]


@every
def test_an_empty_group(case):
    w = matrix(1.0, 3.0)
    opt = optimizer(case, [{"params": []}, {"params": [w]}])
    losses = run(opt, lambda: quadratic(w), 3)
    assert losses[-1] < losses[0]


@every
def test_values_of_a_group_of_its_own(case):
    still, moving = matrix(2.0, 2.0), matrix(2.0, 2.0)
    opt = optimizer(case, [{"params": [still], "lr": 0.0}, {"params": [moving]}])
    run(opt, lambda: quadratic(still) + quadratic(moving), 3)
    assert still.tolist() == [[2.0, 2.0]]
    assert moving.tolist() != [[2.0, 2.0]]


@every
def test_a_group_that_is_added_later(case):
    w, late = matrix(2.0, 2.0), matrix(2.0, 2.0)
    opt = optimizer(case, [w])
    run(opt, lambda: quadratic(w) + quadratic(late), 2)
    opt.add_param_group({"params": late, "lr": 0.01})
    run(opt, lambda: quadratic(w) + quadratic(late), 2)
    assert opt.state[late]["step"] == 2
    assert late.tolist() != [[2.0, 2.0]]


@every
def test_parameters_with_names(case):
    model = network()
    opt = optimizer(case, model.named_parameters())
    assert opt.param_groups[0]["param_names"] == ["first.weight", "second.weight"]
    run(opt, classification(model), 1)


@every
def test_no_gradients_no_step(case):
    w = matrix(1.0, 2.0)
    opt = optimizer(case, [w])
    assert opt.step() is None
    assert w.tolist() == [[1.0, 2.0]]


@every
def test_frozen_parameters_stay(case):
    model = network()
    model.first.weight.requires_grad_(False)
    before = snapshot(model)
    run(optimizer(case, model.parameters()), classification(model), 2)
    assert torch.equal(model.first.weight, before[0])
    assert not torch.equal(model.second.weight, before[1])


@every
def test_a_complex_parameter_is_refused_by_name(case):
    spectrum = torch.zeros(2, 2, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(TypeError, match=rf"{case}\(params\): 'spectrum' is torch.complex64.*real"):
        case.make([("spectrum", spectrum)])
    with pytest.raises(TypeError, match=r"'param_groups\[0\]\[1\]' is torch.complex64"):
        case.make([matrix(1.0, 2.0), spectrum])


@every
def test_negative_hyperparameters_are_refused(case):
    w = matrix(1.0, 2.0)
    assert set(case.negative) <= set(case.make([w]).defaults)
    for name in case.negative:
        with pytest.raises(ValueError, match=rf"{name} must be at least 0, got -1"):
            case.make([w], **{name: -1.0})
        with pytest.raises(ValueError, match=rf"{name} must be at least 0, got -1"):
            case.make([w], **{name: torch.tensor(-1.0)})
        with pytest.raises(ValueError, match=rf"{name} must be at least 0"):
            case.make([{"params": [w], name: -1.0}])


@every
def test_a_group_that_is_refused_is_not_added(case):
    opt = optimizer(case, [matrix(1.0, 2.0)])
    with pytest.raises(ValueError, match="lr must be at least 0"):
        opt.add_param_group({"params": [matrix(1.0, 2.0)], "lr": -1.0})
    assert len(opt.param_groups) == 1


@every
def test_forms_that_belong_elsewhere_are_refused(case):
    w = matrix(1.0, 2.0)
    with pytest.raises(TypeError, match=r"lr must be a number or a 0-d tensor, got list.*scheduler"):
        case.make([w], lr=[0.1, 0.2])
    with pytest.raises(ValueError, match=r"lr must have one element, got shape \(2,\)"):
        case.make([w], lr=torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        case.make([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        case.make(w)


@every
def test_a_tensor_as_lr_is_read_at_every_step(case):
    w, twin = matrix(2.0, 2.0), matrix(2.0, 2.0)
    lr = torch.tensor(0.1, dtype=torch.float64)
    opt, other = optimizer(case, [w], lr=lr), optimizer(case, [twin], lr=0.1)
    run(opt, lambda: quadratic(w), 1)
    run(other, lambda: quadratic(twin), 1)
    assert torch.equal(w, twin)
    lr.fill_(0.0)
    run(opt, lambda: quadratic(w), 1)
    assert torch.equal(w, twin)


def test_betas_are_fractions_and_may_be_tensors():
    w = matrix(1.0, 2.0)
    with pytest.raises(ValueError, match=r"betas\[1\] must be below 1, got 1.0"):
        AdaHessian([w], betas=(0.9, 1.0))
    opt = AdaHessian([w], betas=(torch.tensor(0.9), torch.tensor(0.99)))
    run(opt, lambda: quadratic(w), 2)


def test_muon_takes_matrices_alone():
    with pytest.raises(ValueError, match=r"'bias' must be a matrix, got shape \(3,\)"):
        Muon([("bias", torch.zeros(3, requires_grad=True))])


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


def test_channels_last_kernels():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        plain = nn.Conv2d(4, 6, 3)
    plain.load_state_dict(conv.state_dict())
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    for model in (conv, plain):
        run(Lion(model.parameters(), lr=0.1), lambda model=model: model(x).square().sum(), 3)
    torch.testing.assert_close(conv.weight, plain.weight)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
