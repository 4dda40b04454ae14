"""Policies of normalization layers, against loops over tasks with elementary operations."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import covering, slow
from tests.meta.textbook import assert_close, assert_learns_as, gradients, learner, some_tasks

STEPS, LR, EPS = 2, 0.1, 1e-5


class Net(nn.Module):
    """Two layers with batch normalization between them, vectorized by torch.vmap."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = nn.Linear(2, 4), norm(4), nn.Linear(4, 3)
        with torch.no_grad():
            self.norm.weight.copy_(torch.rand(4) + 0.5)
            self.norm.bias.copy_(torch.randn(4))
        self.double()

    def forward(self, x):
        return self.leave(torch.tanh(self.norm(self.enter(x))))


class Layers(nn.Sequential):
    """The same model as an ``nn.Sequential``."""

    def __init__(self, norm=nn.BatchNorm1d):
        net = Net(norm)
        super().__init__(net.enter, net.norm, nn.Tanh(), net.leave)


class OwnNorm(nn.BatchNorm1d):
    """A norm with its own forward."""

    def forward(self, x):
        is_training = self.training or self.running_mean is None
        return 1.1 * F.batch_norm(
            x, self.running_mean, self.running_var, weight=self.weight, bias=self.bias, training=is_training
        )


def moments(h):
    return h.mean(0), h.var(0, unbiased=False)


def normalised(h, mean, var, weight, bias):
    return (h - mean) / (var + EPS).sqrt() * weight + bias


def forward(p, x, statistics=None):
    """Return the prediction and the input of the norm. Without ``statistics``, use the batch statistics."""
    w1, b1, weight, bias, w2, b2 = p
    h = F.linear(x, w1, b1)
    mean, var = moments(h) if statistics is None else statistics
    return F.linear(torch.tanh(normalised(h, mean, var, weight, bias)), w2, b2), h


class Textbook:
    """A loop over tasks and steps that records the statistics of each pass."""

    def __init__(self, policy, params, *, order=2, running=None, weights=None):
        self.policy, self.params, self.order, self.running = policy, params, order, running
        self.per_step = weights  # (weights, biases), [steps, C] each
        self.passes = {}

    def at(self, p, step):
        return p if self.per_step is None else [*p[:2], *(v[step] for v in self.per_step), *p[4:]]

    def predict(self, p, x, step, number, support_x=None):
        p, statistics = self.at(p, step), None
        if support_x is not None:
            statistics = moments(forward(p, support_x)[1])
        if self.running is not None:
            statistics = [values[step] if self.policy == "per_step" else values for values in self.running]
        out, h = forward(p, x, statistics)
        self.passes.setdefault(number, []).append((h.mean(0).detach(), h.var(0).detach()))
        return out

    def query_loss(self, x, y, query_x, query_y):
        p = list(self.params)
        adapted = [0, 1, 4, 5] if self.per_step is not None else range(6)
        for t in range(STEPS):
            loss = F.mse_loss(self.predict(p, x, t, 2 * t), y)
            grads = torch.autograd.grad(loss, [p[i] for i in adapted], create_graph=self.order == 2)
            for i, g in zip(adapted, grads, strict=True):
                p[i] = p[i] - LR * g
        reference = x if self.policy == "support" else None
        return F.mse_loss(self.predict(p, query_x, STEPS - 1, 2 * STEPS - 1, reference), query_y)

    def losses(self, batch):
        return torch.stack([self.query_loss(*t) for t in zip(*batch.support, *batch.query, strict=True)])

    def moved(self, mean, var, number=None, momentum=0.1):
        """Return running statistics after the passes, or after one of them."""
        for key in sorted(self.passes) if number is None else [number]:
            means, variances = zip(*self.passes[key], strict=True)
            mean = mean.lerp(torch.stack(means).mean(0), momentum)
            var = var.lerp(torch.stack(variances).mean(0), momentum)
        return mean, var


def parameters(model):
    return list(model.parameters())


def maml_of(model, norm, **options):
    return learner(mg.MAML, model, norm=norm, **options)


def norm_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.BatchNorm1d))


POLICIES = ["transductive", "support", "running", "per_step", "per_step_transductive"]
MODELS = {"net": Net, "layers": Layers}
MEMORIES = ["full", "step", "sqrt", "64KiB"]


def setup(policy, model):
    """Return the weights and biases of each step, and all learned tensors."""
    params = parameters(model)
    if not policy.startswith("per_step"):
        return None, params
    weights = tuple(p.detach().expand(STEPS, 4).clone().requires_grad_() for p in params[2:4])
    return weights, [*params[:2], *params[4:], *weights]


def learned_of(maml):
    params = parameters(maml.model)
    if maml.per_step_norms is None:
        return params
    return [*params[:2], *params[4:], *(p for p in maml.per_step_norms.parameters())]


@pytest.mark.parametrize(
    ("policy", "kind", "memory", "order", "task_chunk"),
    covering(POLICIES, MODELS, MEMORIES, [1, 2], [None, 1, 3],
             fast=lambda policy, kind, memory, order, chunk: kind == "net" and order == 2 and (memory, chunk) in (
                 ("full", 1), ("step", None))),
)  # fmt: skip
def test_meta_gradients_and_statistics_are_those_of_the_textbook(
    regression, policy, kind, memory, order, task_chunk
):
    model = MODELS[kind]()
    weights, of = setup(policy, model)
    book = Textbook(policy, parameters(model), order=order, weights=weights)
    maml = maml_of(model, policy, order=order, memory=memory, task_chunk=task_chunk)
    before = [b.clone() for b in model.buffers()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = maml(regression)
    losses = book.losses(regression)
    assert out.norm == policy
    assert_close(out.query_losses, losses)
    assert_close(gradients(out.loss, learned_of(maml)), gradients(losses.mean(), of))
    # The backward pass has recomputed steps, and moved nothing again.
    if policy == "running":
        norm = norm_of(model)
        assert_close((norm.running_mean, norm.running_var), book.moved(*before[:2]))
        assert norm.num_batches_tracked == STEPS + 1
    else:
        assert all(map(torch.equal, model.buffers(), before))
    if policy == "per_step":
        mean, var, count = maml.per_step_norms.buffers()
        assert_close((mean[0], var[0]), book.moved(*before[:2], number=0))
        assert count.tolist() == [1, 2]
    assert_close(maml.adapt(regression.support)(regression.query.x), out.query_outputs)


@pytest.mark.parametrize("memory", [slow("full"), "step"])
@pytest.mark.parametrize("policy", POLICIES)
def test_third_derivatives_are_right_where_norms_are_written_out(regression, policy, memory):
    model = Net()
    weights, of = setup(policy, model)
    maml = maml_of(model, policy, memory=memory)
    seconds = []
    with mg.models.composite_norms():
        loss = maml(regression).loss
        for total, variables in (
            (loss, learned_of(maml)),
            (Textbook(policy, parameters(model), weights=weights).losses(regression).mean(), of),
        ):
            grads = gradients(total, variables, create_graph=True)
            seconds.append(gradients(sum((g**3).sum() for g in grads), variables))
    assert_close(*seconds)


@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize("policy", ["running", "per_step", "per_step_transductive"])
def test_evaluation_uses_the_running_statistics_or_those_of_the_set_at_hand(regression, policy, task_chunk):
    model = Net()
    weights, _ = setup(policy, model)
    maml = maml_of(model, policy, task_chunk=task_chunk)
    for _ in range(3):
        maml(regression)
    maml.eval()
    kept = copy.deepcopy(maml.state_dict())
    source = model.norm if policy == "running" else maml.per_step_norms
    running = None if policy == "per_step_transductive" else [b.clone() for b in source.buffers()][:2]
    losses = Textbook(policy, parameters(model), running=running, weights=weights).losses(regression)
    out = maml(regression)
    assert_learns_as(out, losses, parameters(model)[:2])
    assert_close(maml.adapt(regression.support)(regression.query.x), out.query_outputs)
    assert all(torch.equal(kept[name], value) for name, value in maml.state_dict().items())


def test_statistics_of_a_cumulative_average_weigh_all_passes_alike(regression):
    model = Net(lambda n: nn.BatchNorm1d(n, momentum=None))
    book = Textbook("running", parameters(model))
    maml = maml_of(model, "running")
    maml(regression)
    book.losses(regression)
    means = [torch.stack([mean for mean, _ in book.passes[number]]).mean(0) for number in sorted(book.passes)]
    assert_close(model.norm.running_mean, torch.stack(means).mean(0))


@pytest.mark.parametrize("policy", ["transductive", "support", "running"])
def test_query_losses_on_the_way_follow_the_policy(regression, policy):
    model = Net()
    options = {"norm": policy, "lr": LR}
    maml = mg.MAMLPlusPlus(model, F.mse_loss, steps=STEPS, query_weights=[1.0, 0.0], **options)
    one = mg.MAMLPlusPlus(copy.deepcopy(model), F.mse_loss, steps=1, **options)
    out, expected = maml(regression), one(regression)
    assert_close(out.loss, expected.loss)
    assert_close(gradients(out.loss, parameters(model)), gradients(expected.loss, parameters(one.model)))


def test_norms_of_users_follow(regression):
    results = []
    for kind, policy in ((OwnNorm, "running"), (OwnNorm, None)):
        model = Net(kind)
        maml_of(model, policy)(some_tasks(regression, [0]))
        results.append([model.norm.running_mean, model.norm.running_var])
    assert_close(*results)


@pytest.mark.parametrize("policy", ["support", "running"])
def test_under_autocast_statistics_are_of_single_precision(regression, policy):
    batch = Batch(*(Examples(part.x.float(), part.y.float()) for part in regression))
    losses = []
    for enabled in (False, True):
        model = Net().float()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = maml_of(model, policy)(batch)
        gradients(out.loss, parameters(model))
        assert {b.dtype for b in list(model.buffers())[:2]} == {torch.float32}
        losses.append(out.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_norms_of_steps_do_not_adapt(regression):
    assert set(maml_of(Net(), "per_step", adapt=["norm", "leave"]).adapt(regression.support).params) == {
        "leave.weight",
        "leave.bias",
    }
