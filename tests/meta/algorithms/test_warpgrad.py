"""WarpGrad against a loop over tasks and steps, each of which is differentiated alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import slow

sgd = mg.optim.rules.sgd
STEPS = 3


class Warped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.warp_in = nn.Linear(2, 4), nn.Linear(4, 4)
        self.leave, self.warp_out = nn.Linear(4, 3), nn.Linear(3, 3)
        self.gain = 1.0
        self.double()

    def forward(self, x):
        return self.warp_out(self.leave(torch.tanh(self.gain * self.warp_in(self.enter(x)))))


def chain():
    net = Warped()
    return nn.Sequential(net.enter, net.warp_in, nn.Tanh(), net.leave, net.warp_out)


MODELS = {"net": (Warped, "warp*"), "layers": (chain, ["1", "4.*"])}


def learner_of(model="net", **options):
    make, warp = MODELS[model]
    options = {"inner": sgd(lr=0.1), "steps": STEPS, "warp": warp, **options}
    return mg.WarpGrad(make(), F.mse_loss, **options)


def adapted_names(learner, batch):
    return list(learner.adapt(batch.support).params)


def textbook(learner, batch, *, order=2, lr=0.1, init="learned", momentum=0.0, proximal=0.0):
    """Return the sum over steps of the query losses, where task parameters are constants, and the last losses."""
    names = adapted_names(learner, batch)
    params = dict(learner.model.named_parameters())
    total, lasts = 0, []
    for x, y, query_x, query_y in zip(*batch.support, *batch.query, strict=True):
        values, velocity = {name: params[name].detach() for name in names}, dict.fromkeys(names, 0.0)
        for _ in range(STEPS):
            if init == "learned":
                phi = {name: values[name] + params[name] - params[name].detach() for name in names}
            else:
                phi = {name: values[name].clone().requires_grad_() for name in names}
            loss = F.mse_loss(functional_call(learner.model, phi, (x,)), y)
            grads = torch.autograd.grad(loss, list(phi.values()), create_graph=order == 2)
            pulls = [
                g + proximal * (values[name] - params[name].detach())
                for name, g in zip(names, grads, strict=True)
            ]
            velocity = {
                name: momentum * velocity[name] + pull for name, pull in zip(names, pulls, strict=True)
            }
            moved = {name: phi[name] - lr * velocity[name] for name in names}
            last = F.mse_loss(functional_call(learner.model, moved, (query_x,)), query_y)
            total = total + last
            values = {name: p.detach() for name, p in moved.items()}
            velocity = {name: v.detach() for name, v in velocity.items()}
        lasts.append(last)
    return total / len(lasts), torch.stack(lasts)


def gradients(loss, of, **options):
    return torch.autograd.grad(loss, of, materialize_grads=True, **options)


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task_chunk", [None, 1, slow(3)])
@pytest.mark.parametrize("init", ["learned", "fixed"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_the_meta_gradient_is_that_of_the_textbook(regression, model, order, init, task_chunk):
    learner = learner_of(model, order=order, init=init, task_chunk=task_chunk)
    out = learner(regression)
    loss, lasts = textbook(learner, regression, order=order, init=init)
    assert_close(out.loss, loss)
    assert_close(out.query_losses, lasts)
    of = list(learner.parameters())
    assert_close(gradients(out.loss, of), gradients(loss, of))


@pytest.mark.parametrize("init", ["learned", "fixed"])
def test_second_derivatives_and_those_of_other_results_take_the_steps_again(regression, init):
    learner = learner_of(init=init)
    of = [p for name, p in learner.model.named_parameters() if init == "learned" or "warp" in name]
    (loss, lasts), out = textbook(learner, regression, init=init), learner(regression)
    learner.model.gain = -1.0  # type: ignore[assignment]  # afterwards: the steps are taken with what it was
    seconds = []
    for value in (out.loss, loss):
        grads = gradients(value, of, create_graph=True)
        seconds.append(gradients(sum((g**3).sum() for g in grads), of, retain_graph=True))
    assert_close(*seconds)
    weights = torch.arange(4.0, dtype=torch.float64)
    assert_close(gradients(out.query_losses @ weights, of), gradients(lasts @ weights, of))
    grads = gradients(learner(regression).query_outputs.square().sum(), of)
    assert all(g.any() for g in grads[-2:])


def test_steps_that_are_taken_again_must_be_the_same(regression):
    learner, factors = learner_of(), {"loss": 1.0}
    learner.loss_fn = lambda prediction, target: F.mse_loss(prediction, target) * factors["loss"]
    losses = learner(regression).query_losses
    factors["loss"] = 2.0
    with pytest.raises(RuntimeError, match=r"^WarpGrad\(batch\): the steps did not repeat"):
        torch.autograd.grad(losses[0], list(learner.parameters()))


def test_learned_rates_and_momentum_get_their_gradient(regression):
    rates = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
    learner = learner_of(inner=sgd(lr=rates, momentum=0.9))
    loss, _ = textbook(learner, regression, lr=rates, momentum=0.9)
    of = list(learner.parameters())
    assert any(p is rates for p in of)
    assert_close(gradients(learner(regression).loss, of), gradients(loss, of))


@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize("init", ["learned", "fixed"])
def test_a_proximal_term_that_is_learned_holds_the_steps_in_training_too(regression, init, task_chunk):
    proximal = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    learner = learner_of(init=init, proximal=proximal, start={"leave.bias": "zeros"}, task_chunk=task_chunk)
    nn.init.zeros_(learner.model.leave.bias)
    loss, _ = textbook(learner, regression, init=init, proximal=proximal)
    out = learner(regression)
    assert_close(out.loss, loss)
    of = [p for name, p in learner.named_parameters() if name != "model.leave.bias"]
    assert any(p is proximal for p in of)
    assert_close(gradients(out.loss, of), gradients(loss, of))


def peak(learner, batch):
    learner(batch).loss.backward()
    with mg.MemoryTracker() as tracker:
        learner(batch).loss.backward()
    return tracker.peak


def test_no_graph_of_a_step_is_kept(regression):
    warped = [peak(learner_of(steps=steps), regression) for steps in (2, 12)]
    assert warped[1] < 1.1 * warped[0]
    maml = mg.MAML(Warped(), F.mse_loss, inner=sgd(lr=0.1), steps=12, query_weights=[1.0] * 12)
    assert peak(maml, regression) > 2 * warped[1]


def test_a_torch_func_transform_gives_the_same(regression):
    learner = learner_of()
    params = {name: p.detach() for name, p in learner.named_parameters()}
    got = torch.func.grad(lambda p: functional_call(learner, p, (regression,)).loss)(params)
    expected = gradients(learner(regression).loss, list(learner.parameters()))
    assert_close(list(got.values()), list(expected))


def test_rows_of_tables_are_those_of_the_dense_table():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (2, 3, 6), generator=generator)
    y = torch.randn(2, 3, 6, 3, generator=generator, dtype=torch.float64)
    batch = Batch(*(Examples(i, target) for i, target in zip(ids, y, strict=True)))
    results = []
    for sparse in ([], ["0.weight"]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        learner = mg.WarpGrad(model, F.mse_loss, warp="1", inner=sgd(lr=0.1), steps=STEPS, sparse=sparse)
        found = gradients(learner(batch).loss, list(model.parameters()))
        results.append([g.to_dense() if isinstance(g, mg.sparse.RowSparse) else g for g in found])
    assert_close(*results)


def test_norms_follow_a_policy_and_running_statistics_move_once(regression):
    grads, moved = [], []
    for task_chunk in (None, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
        learner = mg.WarpGrad(model, F.mse_loss, warp="1", inner=sgd(lr=0.1), steps=STEPS, norm="running",
                              task_chunk=task_chunk)  # fmt: skip
        out = learner(regression)
        before = [b.clone() for b in model.buffers()]
        grads.append(gradients(out.loss, list(model.parameters()), retain_graph=True))
        gradients(out.query_losses[0], list(model.parameters()))
        assert all(map(torch.equal, model.buffers(), before))
        moved.append(before)
    assert_close(*grads)
    assert_close(*moved)
    assert moved[0][2] == 2 * STEPS


def test_a_task_that_is_left_out_counts_in_nothing(regression):
    class Bursting(nn.Module):
        def forward(self, prediction, y):
            return F.mse_loss(prediction, y) / (y[0, 0] != 7)

    support = Examples(regression.support.x, regression.support.y.clone())
    support.y[1, 0, 0] = 7.0
    results = []
    for keep in (slice(None), torch.tensor([0, 2, 3])):
        learner = mg.WarpGrad(Warped(), Bursting(), inner=sgd(lr=0.1), steps=STEPS, nonfinite="skip")
        out = learner(Batch(*(Examples(part.x[keep], part.y[keep]) for part in (support, regression.query))))
        results.append((out.loss, gradients(out.loss, list(learner.parameters()))))
    assert_close(*results)


def test_evaluation_copies_and_other_numbers_of_steps(regression):
    learner = learner_of()
    with torch.no_grad():
        out = learner(regression, steps=5)
    assert not out.loss.requires_grad
    assert_close(learner(regression, steps=5).query_losses, out.query_losses)
    assert_close(learner(regression, steps=0).query_losses, learner(regression, steps=0).query_losses)
    for other in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert_close(other(regression).loss, learner(regression).loss)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warp": "wrap*"}, "is no parameter of the model"),
        ({"warp": "*"}, "chooses none of the parameters"),
        ({"init": "meta"}, r'init\): expected "learned" or "fixed"'),
    ],
)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        learner_of(**options)


def test_a_tensor_that_is_no_parameter_is_refused(regression):
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    learner = mg.WarpGrad(Warped(), lambda p, y: F.mse_loss(p * scale, y), inner=sgd(lr=0.1), steps=1)
    with pytest.raises(
        ValueError, match=r"reads a tensor of shape .* that requires grad and is a parameter of neither"
    ):
        learner(regression)


def test_a_start_that_is_drawn_is_the_same_at_every_step(regression):
    drawn = []

    def start(model, x, y):
        drawn.append(torch.rand((), dtype=torch.float64))
        return {"enter.weight": model.enter.weight * drawn[-1]}

    learner = learner_of(inner=sgd(lr=0.0), start=start, task_chunk=1)
    torch.manual_seed(0)
    loss = learner(regression).loss
    weight, each = learner.model.enter.weight, len(drawn) // 4
    assert all(draw == drawn[i - i % each] for i, draw in enumerate(drawn))
    expected = [
        STEPS
        * F.mse_loss(functional_call(learner.model, {"enter.weight": weight * drawn[i * each]}, (x,)), y)
        for i, (x, y) in enumerate(zip(*regression.query, strict=True))
    ]
    torch.testing.assert_close(
        torch.autograd.grad(loss, weight), torch.autograd.grad(torch.stack(expected).mean(), weight)
    )
