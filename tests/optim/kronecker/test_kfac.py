"""K-FAC as a rule: against its optimizer, dense matrices, closed forms and finite differences."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import metagrad as mg
from metagrad.optim.curvature import KnownDiagonal, Kronecker, needs_layers
from metagrad.optim.kronecker.factors import split_damping
from metagrad.optim.kronecker.kfac import KFACState, kfac
from metagrad.optim.kronecker.layer_calls import observed
from metagrad.optim.kronecker.layer_objective import LayerObjective
from metagrad.optim.rule import with_batch_ndim
from metagrad.optim.rules import adahessian, chain, clip_by_norm, mask, natural_gradient, sgd, sophia_g
from metagrad.optim.tape_curvature import TapeCurvature
from metagrad.optim.torch_optim.curvature_optimizer import generators_of
from metagrad.optim.torch_optim.kfac import KFAC
from tests.marks import slow

F64 = torch.float64
EMPIRICAL = Kronecker("empirical")
STEPS = 5


def drawn(*shape, seed=1, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def seeded(make, dtype=F64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().to(dtype)


def perceptron():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))


def convolutional():
    layers = [nn.Conv2d(1, 2, 2, stride=2, padding=1), nn.ReLU(inplace=True), nn.Conv2d(2, 3, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 2))


def sequences():
    # The output of this linear layer is a view, and it is written over.
    return nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Conv1d(5, 3, 2), nn.Flatten(), nn.Linear(9, 2)
    )


NETS = {
    "linear": (perceptron, (6, 3)),
    "convolutions": (convolutional, (6, 1, 5, 5)),
    "sequences": (sequences, (6, 5, 3)),
}
LABELS = torch.tensor([0, 1, 1, 0, 1, 0])
LOSSES = {"cross_entropy": (F.cross_entropy, LABELS), "squares": (F.mse_loss, drawn(6, 2, seed=4))}


def parameters_of(model):
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def steps_of(rule, model, loss_fn, x, y, *, steps=STEPS, seed=0, create_graph=False):
    """Take steps by hand; return the parameters of each."""
    params = parameters_of(model)
    state, seen = rule.init(params), []
    for step in range(steps):
        options = {"create_graph": create_graph, "generators": generators_of(seed, step)}
        objective = LayerObjective(model, loss_fn, x, y, params, **options)
        params, state = rule.update(objective.grads, state, params, objective)
        if not create_graph:
            params = {key: p.detach().requires_grad_() for key, p in params.items()}
        seen.append(params)
    return seen


def assert_close(got, expected, rtol=1e-10):
    assert got.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(got[key].detach(), expected[key].detach(), rtol=rtol, atol=1e-13)


OPTIONS = {
    "plain": {"curvature_every": 1, "inverse_every": 1},
    "intervals": {"curvature_every": 2, "inverse_every": 4, "weight_decay": 0.1, "decay": 0.4},
    "clipped": {"curvature_every": 1, "inverse_every": 2, "kl_clip": 1e-4},
    "clipped, climbs": {"curvature_every": 2, "inverse_every": 2, "kl_clip": 1e-4, "maximize": True},
    "unclipped": {"curvature_every": 1, "inverse_every": 1, "kl_clip": None, "momentum": 0.0, "damping": 0.3},
    "a sum": {"curvature_every": 1, "inverse_every": 1, "loss_reduction": "sum", "maximize": True},
}


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize(
    ("net", "loss", "options"),
    [
        *((net, loss, "intervals") for net in NETS for loss in LOSSES),
        *(("linear", "cross_entropy", options) for options in OPTIONS if options != "intervals"),
    ],
)
def test_equals_the_optimizer_step_for_step(net, loss, options, fisher):
    """Hooks see what the tape has: the factors are equal, and what is made of them is one code."""
    make, shape = NETS[net]
    loss_fn, y = LOSSES[loss]
    model, x, options = seeded(make), drawn(*shape), {"lr": 0.2, "fisher": fisher, **OPTIONS[options]}
    if options.get("loss_reduction") == "sum":
        loss_fn = functools.partial(loss_fn, reduction="sum")
    seen = steps_of(kfac(**options), model, loss_fn, x, y, seed=7)
    opt = KFAC(model, seed=7, **options)
    for params in seen:
        opt.zero_grad()
        with opt.recording():
            loss_fn(model(x), y).backward()
        opt.step()
        assert_close(params, dict(model.named_parameters()))


def test_velocities_of_each_task_are_shortened_as_its_directions_are():
    rule = with_batch_ndim(kfac(lr=0.5, momentum=0.9, kl_clip=1.0), 1)
    params = {"w": torch.zeros(2, 1, dtype=F64)}
    grads, velocity = {"w": params["w"] + torch.tensor([[1.0], [4.0]], dtype=F64)}, {"w": params["w"] + 10.0}
    moved, state = rule.update(grads, KFACState(1, velocity, {}), params)
    expected = torch.tensor([[10.0], [0.5 * 13.0]], dtype=F64)  # half of it, as 0.25 * 4 ** 2 is 4
    torch.testing.assert_close(state.momentum["w"], expected)
    torch.testing.assert_close(moved["w"], -0.5 * expected)


def test_half_precision_moves_in_its_own_dtype():
    model, x = seeded(perceptron, torch.bfloat16), drawn(6, 3, dtype=torch.bfloat16)
    rule = kfac(lr=0.2, curvature_every=1, inverse_every=1)
    params = parameters_of(model)
    objective = LayerObjective(model, F.cross_entropy, x, LABELS, params)
    params, state = rule.update(objective.grads, rule.init(params), params, objective)
    assert {p.dtype for p in params.values()} == {torch.bfloat16}
    assert state.blocks["0.weight"].inverses.inputs.dtype == torch.float32
    (expected,) = steps_of(rule, model.float(), F.cross_entropy, x.float(), LABELS, steps=1)
    assert_near = functools.partial(torch.testing.assert_close, rtol=0.03, atol=0.01)
    assert_near({key: p.float() for key, p in params.items()}, expected)


def test_a_step_is_the_dense_formula():
    r"""The block of a layer is the matrix :math:`G \otimes A`, with each factor damped."""
    model, x, damping = seeded(perceptron), drawn(6, 3), 0.1
    (moved,) = steps_of(
        kfac(lr=0.5, momentum=0.0, damping=damping, kl_clip=None, weight_decay=0.1),
        model,
        F.cross_entropy,
        x,
        LABELS,
        steps=1,
    )
    hidden = model[0](x)
    output = model[2](hidden.tanh())
    of_sum = torch.autograd.grad(F.cross_entropy(output, LABELS, reduction="sum"), [hidden, output])
    ones = torch.ones(6, 1, dtype=F64)
    for index, a, g in ((0, torch.cat([x, ones], 1), of_sum[0]), (2, hidden.tanh().detach(), of_sum[1])):
        moments = a.T @ a / 6, g.T @ g / 6
        shares = split_damping(mg.optim.kronecker.factors.Factors(*moments), damping)
        inputs, outputs = (m + s * torch.eye(len(m), dtype=F64) for m, s in zip(moments, shares, strict=True))
        gradient = g.T @ a / 6
        direction = torch.linalg.solve(torch.kron(outputs, inputs), gradient.flatten()).view_as(gradient)
        parts = [moved[f"{index}.weight"], model[index].weight]
        if index == 0:
            biases = moved["0.bias"], model[0].bias
            parts = [torch.cat([w, b[:, None]], 1) for w, b in zip(parts, biases, strict=True)]
        torch.testing.assert_close(
            parts[0], parts[1] - 0.5 * (direction + 0.1 * parts[1]), rtol=1e-10, atol=1e-12
        )


def test_one_step_solves_linear_regression():
    """With labels of unit variance the Fisher matrix is the Hessian, but for the sample that estimates the noise."""
    model, x = seeded(lambda: nn.Linear(3, 2)), drawn(2000, 3)
    y = x @ torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 1.0]], dtype=F64) + 5

    rule = kfac(lr=1.0, momentum=0.0, damping=1e-12, kl_clip=None, fisher="sampled")
    loss = functools.partial(F.gaussian_nll_loss, var=1.0, reduction="sum")
    (moved,) = steps_of(rule, model, loss, x, y, steps=1)
    before = loss(model(x), y)
    after = loss(x @ moved["weight"].T + moved["bias"], y)
    assert after < 0.02 * before


def test_other_parameters_move_along_the_gradient():
    model = seeded(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.LayerNorm(2)))
    x, params = torch.tensor([0, 1, 4, 2, 2, 0]), parameters_of(model)
    rule = kfac(lr=0.5, momentum=0.0, kl_clip=None)
    objective = LayerObjective(model, F.cross_entropy, x, LABELS, params)
    moved, state = rule.update(objective.grads, rule.init(params), params, objective)
    for key in ("0.weight", "2.weight", "2.bias"):
        torch.testing.assert_close(moved[key], params[key] - 0.5 * objective.grads[key])
    assert state.blocks["0.weight"].updates == 0
    assert state.blocks["0.weight"].factors.outputs.untyped_storage().nbytes() == 8


def test_kl_clip_reaches_parameters_that_are_in_no_layer():
    model = seeded(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.LayerNorm(2)))
    x, params = torch.tensor([0, 1, 4, 2, 2, 0]), parameters_of(model)
    objective = LayerObjective(model, F.cross_entropy, x, LABELS, params)

    def step(kl_clip):
        rule = kfac(lr=0.5, momentum=0.0, kl_clip=kl_clip)
        moved, _ = rule.update(objective.grads, rule.init(params), params, objective)
        return {key: params[key] - moved[key] for key in params}

    whole, short = step(None), step(1e-6)
    change = sum((0.5 * whole[key] * objective.grads[key]).sum() for key in params)
    for key in params:
        torch.testing.assert_close(short[key], whole[key] * (1e-6 / change) ** 0.5, rtol=1e-6, atol=1e-12)


def test_a_bias_that_another_rule_moves_is_no_input():
    """The block of the weight is then that of a layer without bias."""
    model, x = seeded(lambda: nn.Linear(3, 2)), drawn(6, 3)
    params = parameters_of(model)
    objective = LayerObjective(model, F.cross_entropy, x, LABELS, params)
    rule = mask(kfac(lr=0.5, kl_clip=None), "weight", other=sgd(0.1))
    moved, _ = rule.update(objective.grads, rule.init(params), params, objective)
    bare = nn.Linear(3, 2, bias=False, dtype=F64)
    own = {"weight": params["weight"]}
    alone = LayerObjective(bare, lambda z, y: F.cross_entropy(z + model.bias.detach(), y), x, LABELS, own)
    expected, _ = rule.rule.update(alone.grads, rule.rule.init(own), own, alone)
    torch.testing.assert_close(moved["weight"], expected["weight"], rtol=1e-12, atol=0)
    torch.testing.assert_close(moved["bias"], params["bias"] - 0.1 * objective.grads["bias"])


def test_a_layer_without_a_part_in_the_loss_keeps_its_block():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.spare = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
            self.chosen = "one"

        def forward(self, x):
            self.spare(x)
            return self.get_submodule(self.chosen)(x)

    model, x = seeded(TwoHeads), drawn(6, 3)
    rule, params = kfac(lr=0.1, curvature_every=1, inverse_every=1), parameters_of(model)
    state = rule.init(params)
    for chosen, updates in (("one", [1, 0, 0]), ("two", [1, 1, 0]), ("two", [1, 2, 0])):
        model.chosen = chosen
        objective = LayerObjective(model, F.cross_entropy, x, LABELS, params)
        params, state = rule.update(objective.grads, state, params, objective)
        assert [state.blocks[f"{name}.weight"].updates for name in ("one", "two", "spare")] == updates


def test_tensors_are_as_numbers():
    model, x, every = seeded(perceptron), drawn(6, 3), {"curvature_every": 1, "inverse_every": 1}
    numbers = {"lr": 0.2, "momentum": 0.5, "damping": 0.1, "weight_decay": 0.1, "decay": 0.9, "kl_clip": 1e-3}
    tensors = {key: torch.tensor(value, dtype=F64) for key, value in numbers.items()}
    pairs = [
        steps_of(kfac(**hyper, **every), model, F.cross_entropy, x, LABELS) for hyper in (numbers, tensors)
    ]
    for one, other in zip(*pairs, strict=True):
        assert_close(one, other)


def test_hyperparameters_by_step_and_by_parameter():
    model, x, steps = seeded(perceptron), drawn(6, 3), range(2)
    rates = [
        {key: 0.1 * (step + p.detach().abs()) for key, p in parameters_of(model).items()} for step in steps
    ]
    by_step = {"damping": [0.1, 0.2], "decay": torch.tensor([0.9, 0.3], dtype=F64), "kl_clip": [1.0, 1e-5]}
    every = {"curvature_every": 1, "inverse_every": 1}
    rule, params = kfac(lr=rates, **by_step, **every), parameters_of(model)
    state = expected_state = rule.init(params)
    for step in steps:
        objective = LayerObjective(model, F.cross_entropy, x, LABELS, params, create_graph=True)
        of_step = kfac(lr=rates[step], **{key: values[step] for key, values in by_step.items()}, **every)
        expected, expected_state = of_step.update(objective.grads, expected_state, params, objective)
        params, state = rule.update(objective.grads, state, params, objective)
        assert_close(params, expected)
    with pytest.raises(ValueError, match="has one value for each of 2 steps"):
        rule.update(objective.grads, state, params, objective)


def test_the_clip_bounds_the_change_of_each_task():
    model, xs = seeded(lambda: nn.Linear(3, 2)), drawn(2, 6, 3)
    rule, clip = kfac(lr=1.0, momentum=0.0, kl_clip=1e-3), 1e-3
    params = parameters_of(model)
    objective = LayerObjective(model, F.cross_entropy, xs[0], LABELS, params)
    moved, _ = rule.update(objective.grads, rule.init(params), params, objective)
    change = sum(((params[key] - moved[key]) * objective.grads[key]).sum() for key in params)
    free, _ = kfac(lr=1.0, momentum=0.0, kl_clip=None).update(
        objective.grads, rule.init(params), params, objective
    )
    whole = sum(((params[key] - free[key]) * objective.grads[key]).sum() for key in params)
    assert whole > clip
    # It is the squared length that is clipped: the shortened change is the geometric mean of both.
    torch.testing.assert_close(change, (clip * whole).sqrt())


@pytest.mark.parametrize("net", ["linear", "convolutions"])
def test_stacked_tasks_are_as_each_alone(net):
    make, shape = NETS[net]
    model, xs, rule = (
        seeded(make),
        drawn(3, *shape),
        kfac(lr=0.5, kl_clip=1e-2, curvature_every=1, inverse_every=1),
    )
    starts = {key: p.detach() + 0.1 * drawn(3, *p.shape) for key, p in parameters_of(model).items()}

    def one(task):
        params = {key: p[task].clone().requires_grad_() for key, p in starts.items()}
        objective = LayerObjective(model, F.cross_entropy, xs[task], LABELS, params)
        return objective, params, rule.update(objective.grads, rule.init(params), params, objective)[0]

    alone = [one(task) for task in range(3)]
    factors = [objective.kronecker_factors(EMPIRICAL) for objective, *_ in alone]

    class Known:
        def kronecker_factors(self, request):
            pairs = {key: zip(*(f[key] for f in factors), strict=True) for key in factors[0]}
            return {key: tuple(map(torch.stack, pair)) for key, pair in pairs.items()}

    stacked = with_batch_ndim(rule, 1)
    grads = {key: torch.stack([o.grads[key] for o, *_ in alone]) for key in starts}
    moved, _ = stacked.update(grads, stacked.init(starts), starts, Known())
    assert_close(moved, {key: torch.stack([m[key] for *_, m in alone]) for key in starts}, rtol=1e-9)


def two_steps(make, *shape, fisher="empirical", kl_clip=0.5, seed=0):
    model, x = seeded(make), drawn(*shape)
    start = parameters_of(model)

    def outcome(lr, momentum, damping, weight_decay, decay, *values):
        params = dict(zip(start, values, strict=True))
        options = {"curvature_every": 1, "inverse_every": 1, "kl_clip": kl_clip, "fisher": fisher}
        rule = kfac(
            lr=lr, momentum=momentum, damping=damping, weight_decay=weight_decay, decay=decay, **options
        )
        state = rule.init(params)
        for step in range(2):
            generators = generators_of(seed, step)
            objective = LayerObjective(
                model, F.cross_entropy, x, LABELS, params, create_graph=True, generators=generators
            )
            params, state = rule.update(objective.grads, state, params, objective)
        return torch.stack([(p**3).sum() for p in params.values()]).sum()

    numbers = [torch.tensor(v, dtype=F64, requires_grad=True) for v in (0.2, 0.5, 0.3, 0.1, 0.3)]
    return outcome, (*numbers, *start.values())


def small():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize("kl_clip", [slow(None), 1e-3], ids=["free", "clipped"])
def test_derivatives_equal_finite_differences(kl_clip):
    """Of steps, of all hyper-parameters and of where they begin."""
    fn, inputs = two_steps(small, 6, 2, kl_clip=kl_clip)
    assert mg.gradcheck(fn, inputs, order=2, directions=1)


@pytest.mark.parametrize(
    ("make", "shape", "fisher"),
    [(convolutional, (6, 1, 5, 5), "empirical"), (small, (6, 2), "sampled")],
    ids=["convolutions", "sampled"],
)
def test_first_derivatives_equal_finite_differences(make, shape, fisher):
    fn, inputs = two_steps(make, *shape, fisher=fisher)
    assert mg.gradcheck(fn, inputs, order=1, directions=1, eps=2e-6)  # within which there is no kink


def test_third_derivatives_equal_finite_differences():
    fn, (lr, momentum, damping, *rest) = two_steps(lambda: nn.Linear(2, 2, bias=False), 6, 2)
    assert mg.gradcheck(
        lambda damping, weight: fn(lr, momentum, damping, *rest[:-1], weight),
        (damping, rest[-1]),
        order=3,
        directions=1,
    )


def test_the_clip_and_the_length_where_nothing_changes_have_derivatives():
    lr, clip = (torch.tensor(v, dtype=F64, requires_grad=True) for v in (0.5, 1e-3))
    params = {"weight": torch.ones(1, 2, dtype=F64, requires_grad=True)}
    rule = kfac(lr=lr, kl_clip=clip)

    class Known:
        def kronecker_factors(self, request):
            return {"weight": (torch.eye(2, dtype=F64), torch.eye(1, dtype=F64))}

    for gradient, moves in ((torch.zeros(1, 2, dtype=F64), False), (drawn(1, 2), True)):
        moved, _ = rule.update({"weight": gradient.requires_grad_()}, rule.init(params), params, Known())
        found = torch.autograd.grad((moved["weight"] ** 3).sum(), [lr, clip, gradient])
        assert all(g.isfinite().all() for g in found)
        assert (found[1] != 0) == moves


@pytest.mark.parametrize("memory", ["full", "step", "sqrt", "1MiB"])
@pytest.mark.parametrize("truncate", [None, 2])
def test_unrolls_in_every_mode(memory, truncate):
    model, x = seeded(perceptron), drawn(6, 3)
    lr, damping = (torch.tensor(v, dtype=F64, requires_grad=True) for v in (0.3, 0.2))
    params = parameters_of(model)

    def step(state, t, lr, damping):
        params, kept = state
        objective = LayerObjective(model, F.cross_entropy, x, LABELS, params, create_graph=True)
        rule = kfac(lr=lr, damping=damping, curvature_every=2, inverse_every=2)
        return rule.update(objective.grads, kept, params, objective), objective.value

    def gradients(memory):
        state = (params, kfac().init(params))
        (moved, _), losses = mg.unroll(step, state, lr, damping, steps=4, memory=memory, truncate=truncate)
        total = torch.stack([(p**3).sum() for p in moved.values()]).sum()
        found = torch.autograd.grad(total, [lr, damping, *params.values()], allow_unused=True)
        return losses.detach(), found

    (losses, found), (expected_losses, expected) = gradients(memory), gradients("full")
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected_losses)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_the_objective_is_one_for_other_rules_as_well():
    model, x, params = seeded(perceptron), drawn(6, 3), None
    params = parameters_of(model)
    objective = LayerObjective(model, F.cross_entropy, x, LABELS, params)
    for rule in (adahessian(), sophia_g(), natural_gradient(lr=0.1), chain(clip_by_norm(1.0), kfac())):
        moved, _ = rule.update(objective.grads, rule.init(params), params, objective)
        assert all(p.isfinite().all() for p in moved.values())
    assert not any(m._forward_hooks for m in model.modules())


def test_the_objective_of_a_model_takes_its_own_parameters():
    model, x = seeded(perceptron), drawn(6, 3)
    model[2].requires_grad_(False)
    objective = LayerObjective(model, F.cross_entropy, x, LABELS)
    loss = F.cross_entropy(model(x), LABELS)
    torch.testing.assert_close(objective.value, loss.detach())
    expected = dict(
        zip(("0.weight", "0.bias"), torch.autograd.grad(loss, list(model[0].parameters())), strict=True)
    )
    assert_close(objective.grads, expected)
    assert list(objective.kronecker_factors(EMPIRICAL)) == ["0.weight"]


def test_factors_are_constants_unless_asked_for():
    model, x = seeded(perceptron), drawn(6, 3)
    for create_graph in (False, True):
        objective = LayerObjective(model, F.cross_entropy, x, LABELS, create_graph=create_graph)
        for request in (EMPIRICAL, Kronecker("sampled")):
            factors = objective.kronecker_factors(request)
            assert factors["2.weight"][0].requires_grad is create_graph
            assert factors["2.weight"][1].requires_grad is create_graph


def test_which_rules_need_layers():
    rule = kfac(curvature_every=2, inverse_every=2)
    assert [needs_layers(rule, step) for step in range(3)] == [True, False, True]
    assert needs_layers(chain(clip_by_norm(1.0), rule), 0)
    assert needs_layers((sgd(0.1), mask(rule, "*")), 0)
    assert not needs_layers(sophia_g(), 0)


class Applied(nn.Module):
    """A layer that is used in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(3, 3), way

    def forward(self, x):
        return self.way(self.layer, x)


def without_grad(layer, x):
    with torch.no_grad():
        return layer(x) + x


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (lambda layer, x: layer(layer(x)), "'layer.weight' was called twice"),
        (lambda layer, x: F.linear(x, layer.weight) + x, "its weight is used by hand"),
        (lambda layer, x: torch.vmap(layer)(x), "within a torch.vmap of the model's own"),
        (lambda layer, x: torch.vmap(torch.vmap(layer))(x[None])[0], "in a transform of torch.func within"),
        (lambda layer, x: checkpoint(layer, x, use_reentrant=True), "in a checkpoint"),
        (without_grad, "without grad mode"),
        (
            lambda layer, x: torch.func.vjp(layer, x)[0],
            "a transform of torch.func that is not the vmap",
        ),
    ],
    ids=["twice", "by hand", "vmap", "two vmaps", "checkpoint", "no_grad", "vjp"],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_calls_that_cannot_be_seen_are_refused_by_name(way, message):
    model, x = seeded(lambda: Applied(way)), drawn(6, 3)
    with pytest.raises(ValueError, match=message):
        LayerObjective(model, F.cross_entropy, x, LABELS).kronecker_factors(EMPIRICAL)
    assert not model.layer._forward_hooks


def test_layers_that_are_grouped_or_shared_are_refused_by_name():
    grouped = nn.Sequential(nn.Conv1d(4, 4, 1, groups=2))
    with pytest.raises(ValueError, match=r"kfac\(\.\.\.\): '0' is a convolution of 2 groups"):
        LayerObjective(grouped, F.cross_entropy, drawn(6, 4, 1), LABELS)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="'0' shares a parameter with"), observed(tied, ("0.weight",)):
        pass


def test_other_curvature_is_refused():
    params = {"weight": torch.ones(2, 2, requires_grad=True)}
    grads = mg.grad((params["weight"] ** 2).sum(), params, create_graph=True)
    rule = kfac()
    with pytest.raises(ValueError, match=r"kfac\(\.\.\.\)\.update: this step needs curvature, and got None"):
        rule.update(grads, rule.init(params), params)
    for curvature in (TapeCurvature(params, grads), KnownDiagonal({})):
        with pytest.raises(
            TypeError, match=r"needs the Kronecker factors of layers.*has no kronecker_factors"
        ):
            rule.update(grads, rule.init(params), params, curvature)


def test_factors_of_another_model_are_refused():
    model, x, rule = seeded(lambda: nn.Linear(3, 2)), drawn(6, 3), kfac()
    params = parameters_of(seeded(lambda: nn.Linear(5, 2)))
    objective = LayerObjective(model, F.cross_entropy, x, LABELS)
    with pytest.raises(ValueError, match=r"factors of 'weight' must be \(6, 6\) and \(2, 2\), got \(4, 4\)"):
        rule.update(params, rule.init(params), params, objective)


def test_drawn_labels_need_a_known_loss():
    model, x, rule = seeded(perceptron), drawn(6, 3), kfac(fisher="sampled")
    objective = LayerObjective(model, lambda z, y: z.square().mean(), x, LABELS)
    params = dict(model.named_parameters())
    with pytest.raises(ValueError, match="needs a loss of known form"):
        rule.update(objective.grads, rule.init(params), params, objective)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, r"kfac\(\.\.\.\): lr must be at least 0"),
        ({"decay": 1.0}, ValueError, r"kfac\(\.\.\.\): decay must be below 1"),
        ({"kl_clip": -1.0}, ValueError, r"kfac\(\.\.\.\): kl_clip must be at least 0"),
        ({"curvature_every": 0}, ValueError, "curvature_every must be a whole number"),
        (
            {"curvature_every": 3},
            ValueError,
            "inverse_every must be a multiple of curvature_every, got 10 and 3",
        ),
        ({"fisher": "exact"}, ValueError, "fisher must be 'empirical' or 'sampled', got 'exact'"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction must be 'mean' or 'sum', got 'none'"),
        ({"damping": "much"}, TypeError, "damping must be a number"),
        ({"damping": {"w": 1.0}}, TypeError, "damping is one number for all layers, got a dict"),
    ],
)
def test_options_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        kfac(**options)


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match=r"kfac\(\.\.\.\)\.init: 'weight' is torch.complex64"):
        kfac().init({"weight": torch.ones(2, 2, dtype=torch.complex64)})
