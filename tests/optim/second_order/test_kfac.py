"""K-FAC: steps, hooks and supported layers."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import metagrad
from metagrad.optim import KFAC
from tests.optim.torch_optim.cases import (
    assert_equal,
    assert_near,
    batch,
    classification,
    closure_of,
    network,
    run,
    snapshot,
)

F64 = torch.float64
OPTIONS = [
    {},
    {"eigen": True},
    {"fisher": "sampled", "seed": 3},
    {"curvature_every": 2, "inverse_every": 4, "kl_clip": None, "weight_decay": 0.01},
]
every = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "eigen", "sampled", "intervals"])


def kfac(model, options=None, **more):
    return KFAC(model, **{"lr": 0.05, "curvature_every": 1, "inverse_every": 2, **(options or {}), **more})


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def after(loop, options=None, steps=4, **more):
    model = network(F64)
    opt = kfac(model, options, **more)
    for _ in range(steps):
        loop(model, opt)
    return snapshot(model)


def by_closure(model, opt):
    opt.step(closure_of(opt, classification(model, F64)))


def by_hand(model, opt, loss=None):
    """Take a step without a closure."""
    opt.zero_grad()
    with opt.recording():
        (classification(model, F64)() if loss is None else loss()).backward()
    opt.step()


def test_other_modules_move_by_plain_momentum():
    def layers():
        return nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(F64)

    models = [seeded(layers) for _ in range(2)]
    for model in models:
        model[2].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"0 \(Embedding\), 1 \(LayerNorm\)"):
        opts = [kfac(models[0], kl_clip=None)]
    opts.append(torch.optim.SGD(models[1].parameters(), lr=0.05, momentum=0.9))
    for ids in ([1, 2, 2], [2, 5, 0], [7, 1, 1]):
        for model, opt in zip(models, opts, strict=True):
            opt.zero_grad()
            F.cross_entropy(model(torch.tensor(ids)), torch.arange(3)).backward()
            opt.step()
    assert_near(*(snapshot(model) for model in models))
    assert not torch.equal(models[0][0].weight, seeded(layers)[0].weight)


def test_factors_are_averages_and_inverses_are_renewed_at_intervals():
    model = network(F64)
    opt = kfac(model, curvature_every=2, inverse_every=4, decay=0.6)
    state, seen = opt.state[model.first.weight], []
    x, _ = batch(F64)
    for step in range(9):
        scale = 1.0 + step
        by_hand(model, opt, lambda scale=scale: model(x * scale).square().mean())
        seen.append((state["inputs"], state["input_inverse"], state["updates"]))
    assert [u for *_, u in seen] == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    moment = x.T @ x / 12
    expected = moment
    for k, step in enumerate(range(0, 9, 2), 1):
        kept = min(1 - 1 / k, 0.6)
        expected = kept * expected + (1 - kept) * moment * (1 + step) ** 2
        torch.testing.assert_close(seen[step][0], expected, rtol=1e-10, atol=1e-12)
    renewed = [not torch.equal(b[1], a[1]) for a, b in itertools.pairwise(seen)]
    assert renewed == [False, False, False, True, False, False, False, True]


@pytest.mark.parametrize("maximize", [False, True])
def test_velocities_are_shortened_as_directions_are(maximize):
    """W moves by eta nu (mu V + D). Unscaled velocities would carry steps beyond ``kl_clip``."""
    layer = nn.Linear(1, 1, bias=False, dtype=F64)
    opt = KFAC(layer, lr=0.5, momentum=0.9, kl_clip=1e-3, inverse_every=100, maximize=maximize)
    w, velocity, block = layer.weight.detach().clone(), 0.0, opt.state[layer.weight]
    for slope in (2.0, 2.0, -3.0, 1e-3):
        opt.zero_grad()
        (slope * layer(torch.ones(1, 1, dtype=F64))).sum().backward()
        opt.step()
        direction = slope * float(block["input_inverse"] * block["output_inverse"])
        length = min(1.0, (1e-3 / (0.25 * direction * slope)) ** 0.5)
        velocity = length * (0.9 * velocity + (-direction if maximize else direction))
        w = w - 0.5 * velocity
        torch.testing.assert_close(layer.weight.detach(), w, rtol=1e-12, atol=0)
    assert length == 1


def test_a_bias_of_another_group_is_no_input():
    layer = seeded(lambda: nn.Linear(4, 3).to(F64))
    opt = KFAC(layer, params=[{"params": [p]} for p in layer.parameters()], lr=0.1, kl_clip=None)
    before = snapshot(layer)
    loss = F.cross_entropy(layer(batch(F64)[0]), batch(F64)[1])
    loss.backward()
    opt.step()
    x, state = batch(F64)[0], opt.state[layer.weight]
    torch.testing.assert_close(state["inputs"], x.T @ x / len(x))
    direction = state["output_inverse"] @ layer.weight.grad @ state["input_inverse"]
    assert_near(snapshot(layer), [before[0] - 0.1 * direction, before[1] - 0.1 * layer.bias.grad])


@pytest.mark.parametrize("eigen", [False, True])
def test_a_bias_without_a_gradient_has_one_of_zeros_in_its_layer(eigen):
    moved = []
    for is_zero in (True, False):
        layer = seeded(lambda: nn.Linear(4, 3).to(F64))
        opt = kfac(layer, lr=0.1, eigen=eigen, momentum=0.0)
        before = snapshot(layer)
        F.cross_entropy(layer(batch(F64)[0]), batch(F64)[1]).backward()
        layer.bias.grad = torch.zeros_like(layer.bias) if is_zero else None
        opt.step()
        moved.append(snapshot(layer))
    assert_near(moved[0][:1], moved[1][:1], rtol=1e-12, atol=0.0)
    assert_equal(before[1:], moved[1][1:])


def test_checkpointing_changes_nothing():
    def loop(model, opt):
        opt.zero_grad()
        x, y = batch(F64)
        F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
        opt.step()

    assert_equal(after(loop), after(by_closure))


def test_under_autocast_factors_are_float32():
    model = network()
    opt = kfac(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = classification(model)()
    loss.backward()
    opt.step()
    tensors = [v for v in opt.state[model.first.weight].values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 5
    assert all(v.dtype == torch.float32 and v.isfinite().all() for v in tensors)


def test_hooks_are_removed_on_close_and_with_the_optimizer():
    model = network()
    opt = kfac(model)
    assert all(len(layer._forward_hooks) == 1 for layer in model.children())
    opt.close()
    assert not any(layer._forward_hooks for layer in model.children())
    opt.close()
    opt = kfac(model)
    ref = weakref.ref(opt)
    run(opt, classification(model), 1)
    del opt
    gc.collect()
    assert ref() is None
    assert not any(layer._forward_hooks for layer in model.children())


def test_layers_called_twice_are_refused_by_name():
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    opt = kfac(model)
    with pytest.raises(ValueError, match=r"layer of '0\.weight' was called twice in one backward pass"):
        model(model(torch.ones(2, 3))).sum().backward()
    opt.zero_grad()
    for loss in [model(torch.ones(2, 3)).sum() for _ in range(2)]:  # two passes are two micro-batches
        loss.backward()
    opt.step()


@pytest.mark.parametrize("eigen", [False, True])
def test_calls_without_examples_have_no_factors(eigen):
    moved = []
    for is_called in (True, False):
        model = seeded(lambda: nn.Linear(4, 3))
        opt = kfac(model, eigen=eigen)
        F.mse_loss(model(batch()[0]), torch.ones(12, 3)).backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        if is_called:
            model(torch.empty(0, 4)).sum().backward()
        opt.step()
        moved.append(snapshot(model))
    assert_equal(*moved)


@every
def test_a_bias_that_is_frozen_between_steps_begins_its_layer_anew(options):
    """Its layer has one input less, and other factors."""
    model = seeded(lambda: nn.Linear(4, 3))
    opt = kfac(model, options, curvature_every=2)
    for is_trained in (True, False, True):
        model.bias.requires_grad_(is_trained)
        model.bias.grad = None
        before = snapshot(model)
        run(opt, classification(model), 1)
        assert opt.state[model.weight]["updates"] == 1
        assert opt.state[model.weight]["inputs"].shape == ((5, 5) if is_trained else (4, 4))
        moved = [not torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True)]
        assert moved == [True, is_trained]


def test_a_weight_that_is_made_of_parameters_is_no_layers():
    """As by ``nn.utils.weight_norm``, which is deprecated, or by a network that makes weights."""
    model = nn.Linear(4, 3)
    model.made_of = nn.Parameter(model.weight.detach().clone())
    del model.weight
    model.weight = 2 * model.made_of
    with pytest.warns(UserWarning, match="moved along the plain gradient: the model itself"):
        opt = kfac(model)
    assert not opt._layers


def test_options_are_those_of_the_rule():
    with pytest.raises(ValueError, match=r"KFAC\(params\): fisher: expected one of 'empirical', 'sampled'"):
        KFAC(network(), fisher="true")


def test_parameters_in_place_of_the_model_are_refused():
    with pytest.raises(TypeError, match=r"model must be the nn.Module whose layers are observed, got"):
        KFAC(network().parameters())


def test_groups_have_one_kind_of_labels():
    model = network()
    opt = KFAC(model, params=[{"params": [model.first.weight]}])
    with pytest.raises(ValueError, match="fisher must be the same in all groups"):
        opt.add_param_group({"params": [model.second.weight], "fisher": "sampled"})


def test_the_sum_of_losses_takes_the_step_of_their_mean_at_damping_to_scale():
    """A sum has N times the gradient and the Fisher matrix of the mean."""

    def summed(model, opt):
        x, y = batch(F64)
        opt.step(closure_of(opt, lambda: F.cross_entropy(model(x), y, reduction="sum")))

    expected = after(by_closure, kl_clip=None, damping=0.1)
    assert_near(after(summed, kl_clip=None, damping=1.2, loss_reduction="sum"), expected)


def test_drawn_labels_give_the_gauss_newton_matrix():
    """For half the squares of a linear model it is X^T X / N. One step is Newton's, up to the noise of labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=generator, dtype=F64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=F64)
    layer = nn.Linear(3, 1, bias=False, dtype=F64)
    opt = KFAC(layer, lr=1.0, momentum=0.0, damping=1e-12, kl_clip=None, fisher="sampled", seed=0)
    opt.step(closure_of(opt, lambda: F.mse_loss(layer(x), y) / 2))
    expected = torch.tensor([[1.0, -2.0, 0.5]], dtype=F64)
    # The variance of the drawn residuals has a deviation of (2 / 4000)^(1/2).
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=0.1, atol=0.05)


class Valley(nn.Module):
    """Rosenbrock's function of parameters that are in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([-1.2, 1.0]))

    def forward(self) -> torch.Tensor:
        return (1 - self.w[0]) ** 2 + 100 * (self.w[1] - self.w[0] ** 2) ** 2


def test_parameters_that_are_in_no_layer_stay_finite():
    """Plain momentum at this learning rate ends at NaN within ten steps."""
    model = Valley()
    with pytest.warns(UserWarning, match=r"plain gradient: the model itself \(Valley\)"):
        opt = KFAC(model)
    first = float(model().detach())
    for _ in range(100):
        opt.zero_grad()
        model().backward()
        opt.step()
    assert float(model().detach()) < 0.2 * first


def test_a_step_takes_few_functions_before_it_moves():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    opt, seen, library = KFAC(model), set(), str(Path(metagrad.__file__).parent)
    F.cross_entropy(model(torch.randn(16, 4)), torch.arange(16) % 3).backward()

    def profile(frame, event, function):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(library) and not code.co_name.startswith("<"):
            seen.add((code.co_filename, code.co_name))
        if event == "c_call" and function.__name__ == "copy_":
            sys.setprofile(None)

    sys.setprofile(profile)
    try:
        opt.step()
    finally:
        sys.setprofile(None)
    assert 0 < len(seen) <= 12, seen
    assert len({file for file, _ in seen}) <= 5


def test_tied_weights_that_stay_do_not_matter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    untied = copy.deepcopy(model)
    model[2].weight = model[0].weight
    untied[2].weight.data = model[0].weight.data.clone()
    x, y = torch.randint(5, (2, 8))
    for net in (model, untied):
        body = nn.Sequential(net[1]) if net is untied else net
        opt = KFAC(body, params=[{"params": list(net[1].parameters())}])
        nn.functional.cross_entropy(net(x), y).backward()
        opt.step()
    assert torch.equal(model[1].weight, untied[1].weight)
