"""Heads on a shared embedding: each equals a loop over tasks with the head of the textbook, at orders 1 and 2."""

import copy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.tasks import Batch, Examples, FewShot
from tests.marks import covering, fast
from tests.meta.textbook import Adapting, some_tasks

TASKS, WAYS, FEATURES = 3, 3, 4
LABELS = torch.tensor([[0, 1, 2, 0, 1, 2, 2], [2, 2, 2, 2, 1, 0, 0], [0, 0, 1, 1, 2, 0, 1]])  # unequal shots


def prototypes(x, y, query, params):
    means = torch.stack([x[y == k].mean(0) for k in range(WAYS)])
    return -torch.stack([torch.stack([(q - mean).pow(2).sum() for mean in means]) for q in query])


def cosines(x, y, query, params):
    means = torch.stack([x[y == k].mean(0) for k in range(WAYS)])
    cos = [torch.stack([q @ mean / (q.norm() * mean.norm()) for mean in means]) for q in query]
    return params["scale"] * torch.stack(cos)


def with_one(x):
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def normal_equations(x, y, penalty):
    return (
        torch.linalg.inv(x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype))
        @ x.T
        @ F.one_hot(y).to(x.dtype)
    )


def ridge(x, y, query, params):
    weight = normal_equations(with_one(x), y, params["log_penalty"].exp())
    return params["log_scale"].exp() * with_one(query) @ weight + params["bias"]


class Case(NamedTuple):
    make: object
    textbook: object
    features: int = FEATURES


def cosine_protonet(model, **arguments):
    return mg.ProtoNet(model, distance="cosine", scale=nn.Parameter(torch.tensor(3.0)), **arguments)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()).double())

    def forward(self, logits, y):
        return F.cross_entropy(logits / self.temperature, y)


def tempered_protonet(model, **arguments):
    return mg.ProtoNet(model, Tempered(), **arguments)


CASES = {
    "ProtoNet": Case(mg.ProtoNet, prototypes),
    "ProtoNet, cosine": Case(cosine_protonet, cosines),
    "R2D2": Case(mg.R2D2, ridge),
    "R2D2, more features than shots": Case(mg.R2D2, ridge, features=9),
}
LEARNED_LOSS = {"ProtoNet, learned loss": Case(tempered_protonet, prototypes)}
every = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def embedding(features=FEATURES):
    """Statistics of the batch: of one task, and of support and query examples apart."""
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    return nn.Sequential(nn.Linear(2, 5), norm, nn.Tanh(), nn.Linear(5, features)).double()


def make(case, **arguments):
    return case.make(embedding(case.features), **arguments).double()


@pytest.fixture
def batch():
    x, query = torch.randn(TASKS, 7, 2).double(), torch.randn(TASKS, 5, 2).double()
    return Batch(Examples(x, LABELS), Examples(query, torch.randint(WAYS, (TASKS, 5))))


def textbook_losses(algorithm, textbook, batch):
    params = dict(algorithm.named_parameters())
    losses = []
    for x, y, query, target in zip(*batch.support, *batch.query, strict=True):
        logits = textbook(algorithm.model(x), y, algorithm.model(query), params)
        losses.append(algorithm.loss_fn(logits, target))
    return torch.stack(losses)


def derivatives(losses, params):
    """Gradients of a loss, and of a function of these that is not linear."""
    first = torch.autograd.grad(losses.mean(), params, create_graph=True)
    return first, torch.autograd.grad(sum(g.sin().sum() for g in first), params)


def assert_close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "chunk"),
    covering(CASES | LEARNED_LOSS, (None, 1, 2), fast=lambda name, chunk: chunk != 2 or name == "R2D2"),
)
def test_losses_and_derivatives_are_those_of_the_textbook(name, chunk, batch):
    case = (CASES | LEARNED_LOSS)[name]
    algorithm = make(case, task_chunk=chunk)
    params = list(algorithm.parameters())
    out = algorithm(batch)
    expected = textbook_losses(algorithm, case.textbook, batch)
    assert_close(out.query_losses, expected)
    assert_close(out.loss, expected.mean())
    for found, wanted in zip(
        derivatives(out.query_losses, params), derivatives(expected, params), strict=True
    ):
        assert_close(found, wanted)


@every
def test_gradcheck_of_a_head_at_orders_one_and_two(case):
    head = make(case)
    labels = F.one_hot(LABELS[:1], WAYS).double()

    def logits(features, query):
        return head.logits(head.fit(features, labels), query)

    inputs = [torch.randn(1, n, 3, dtype=torch.float64, requires_grad=True) for n in (7, 2)]
    torch.autograd.gradcheck(logits, inputs)
    torch.autograd.gradgradcheck(logits, inputs, nondet_tol=1e-12)


@every
def test_a_fitted_head_predicts_what_forward_does(case, batch):
    algorithm = make(case)
    out, fast = algorithm(batch), algorithm.adapt(batch.support)
    assert isinstance(algorithm, mg.meta.Algorithm)
    assert_close(fast(batch.query.x), out.query_outputs)
    assert out.query_outputs.shape == (TASKS, 5, WAYS)
    assert out.support_losses.shape == fast.support_losses.shape == (TASKS, 0)
    assert out.steps.tolist() == fast.steps.tolist() == [0] * TASKS
    assert not out.skipped.any()
    assert all(value.shape[0] == TASKS for value in fast.params.values())


@every
def test_a_call_with_other_parameters(case, batch):
    algorithm, other = make(case), make(case)
    params = dict(other.named_parameters())
    adapt = functional_call(
        Adapting(algorithm), {f"algorithm.{k}": p for k, p in params.items()}, (batch.support,)
    )
    expected = other(batch)
    assert_close(functional_call(algorithm, params, (batch,)).loss, expected.loss)
    assert_close(adapt(batch.query.x), expected.query_outputs)
    grads = torch.func.grad(lambda p: functional_call(algorithm, p, (batch,)).loss)(params)
    assert_close(list(grads.values()), list(torch.autograd.grad(expected.loss, list(params.values()))))


@pytest.mark.parametrize("name", fast({"ProtoNet"}, CASES))
def test_forward_mode_and_hessians_of_torch_func(name, batch):
    case = CASES[name]
    algorithm = case.make(nn.Linear(2, 2)).double()
    params = {name: p.detach() for name, p in algorithm.named_parameters()}
    loss = lambda p: functional_call(algorithm, p, (batch,)).loss  # noqa: E731
    direction = {name: torch.randn_like(p) for name, p in params.items()}
    gradient = torch.func.grad(loss)
    slope = sum((g * v).sum() for g, v in zip(gradient(params).values(), direction.values(), strict=True))
    assert_close(torch.func.jvp(loss, (params,), (direction,))[1], slope)
    expected = torch.func.grad(lambda p: sum((g * direction[n]).sum() for n, g in gradient(p).items()))(
        params
    )
    assert_close(torch.func.jvp(gradient, (params,), (direction,))[1], expected)


@every
def test_a_task_that_is_not_finite_is_told_or_left_out(case, batch):
    algorithm = make(case)
    batch.support.x[1, 0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=rf"^{algorithm._name}: .* task 1 is nan on its query"):
        algorithm(batch)
    algorithm.nonfinite = "skip"
    out = algorithm(batch)
    assert out.skipped.tolist() == [False, True, False]
    rest = algorithm(some_tasks(batch, [0, 2]))
    params = list(algorithm.parameters())
    assert_close(torch.autograd.grad(out.loss, params), torch.autograd.grad(rest.loss, params))


def test_a_gradient_that_is_not_finite_is_told(batch):
    class Root(nn.Module):
        def forward(self, x):
            return x.abs().sqrt()

    algorithm = mg.ProtoNet(nn.Sequential(nn.Linear(2, 2, bias=False), Root()).double())
    batch.support.x[2, 3] = 0.0
    with pytest.raises(FloatingPointError, match=r"^ProtoNet: the meta-gradient of task 2 is not finite"):
        algorithm(batch).loss.backward()

    class Tempered(nn.Linear):
        def forward(self, logits, y):
            return F.cross_entropy(logits / self.bias.exp(), y)

    tempered = mg.ProtoNet(nn.Linear(2, 2), Tempered(1, 1))
    half = torch.randn(2, 3, 2), torch.tensor([[0, 1, 2], [0, 1, 0]])
    with pytest.raises(FloatingPointError, match=r"task 1 .* the -inf of a class that a task lacks"):
        tempered((half, half)).loss.backward()


@every
def test_single_precision_and_half(case, batch):
    algorithm = make(case)
    wide = algorithm(batch).query_outputs
    narrow = algorithm.float()
    single = Batch(*(Examples(part.x.float(), part.y) for part in batch))
    out = narrow(single)
    assert out.query_outputs.dtype == torch.float32
    torch.testing.assert_close(out.query_outputs.double(), wide, rtol=1e-3, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        half = narrow(single)
    assert half.query_outputs.dtype == torch.float32
    half.loss.backward()


def test_models_without_parameters_and_frozen_ones(batch):
    nearest_mean = mg.ProtoNet(nn.Identity())
    assert nearest_mean(batch).query_outputs.shape == (TASKS, 5, WAYS)
    frozen = mg.R2D2(embedding().requires_grad_(False)).double()
    frozen(batch).loss.backward()
    assert all(p.grad is None for p in frozen.model.parameters())
    assert frozen.log_penalty.grad is not None


def test_running_statistics_are_those_of_tasks_one_by_one(batch):
    model = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5)).double()
    expected = copy.deepcopy(model)
    for x, query in zip(batch.support.x, batch.query.x, strict=True):
        expected(x), expected(query)
    algorithm = mg.ProtoNet(model)
    with pytest.warns(UserWarning, match="^ProtoNet: the tasks .* one by one, because BatchNorm1d"):
        algorithm(batch)
    assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
    model.eval()
    model[1].track_running_stats = True
    logits = algorithm(batch).query_outputs
    expected = prototypes(model(batch.support.x[0]), LABELS[0], model(batch.query.x[0]), {})
    assert_close(logits[0], expected)


@pytest.mark.parametrize("chunk", [None, 1])
@every
def test_padded_tasks_are_the_tasks_alone(case, chunk):
    x, labels = torch.randn(60, 2, dtype=torch.float64), torch.arange(60) % 5
    batch = FewShot((x, labels), ways=(2, 4), shots=(1, 3), queries=2).sample(3)
    assert not batch.support.mask.all()
    algorithm = case.make(nn.Linear(2, case.features), task_chunk=chunk).double()
    params, out, losses = list(algorithm.parameters()), algorithm(batch), []
    for i in range(3):
        real = [(part.x[i][part.mask[i]], part.y[i][part.mask[i]]) for part in batch]
        alone = algorithm(tuple((x.unsqueeze(0), y.unsqueeze(0)) for x, y in real))
        ways = alone.query_outputs.shape[-1]
        assert_close(out.query_outputs[i, : len(real[1][1]), :ways], alone.query_outputs[0])
        assert out.query_outputs[i, :, ways:].isneginf().all()
        losses.append(alone.loss)
    assert_close(derivatives(out.query_losses, params), derivatives(torch.stack(losses), params))
    assert_close(algorithm.adapt(batch.support)(batch.query.x), out.query_outputs)


def test_padding_that_would_count_in_batch_statistics_is_refused(batch):
    labels = LABELS.clone()
    labels[0, -1] = -100
    with pytest.raises(ValueError, match=r"^R2D2\(batch\): some labels are ignored .* batch statistics"):
        make(CASES["R2D2"])(batch._replace(support=batch.support._replace(y=labels)))


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("policy", ["transductive", "support", "running"])
def test_statistics_by_a_policy(policy, chunk, batch):
    enter, norm, leave = nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)
    algorithm = mg.R2D2(nn.Sequential(enter, norm, nn.Tanh(), leave), norm=policy, task_chunk=chunk).double()

    def embedded(x, mean, var):
        return leave(torch.tanh((enter(x) - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias))

    def of_set(x):
        return enter(x).mean(0), enter(x).var(0, unbiased=False)

    def losses(by):
        found = []
        for x, y, query, target in zip(*batch.support, *batch.query, strict=True):
            logits = ridge(embedded(x, *by(x, x)), y, embedded(query, *by(query, x)), params)
            found.append(F.cross_entropy(logits, target))
        return torch.stack(found)

    params = dict(algorithm.named_parameters())
    expected = losses(lambda x, support: of_set(support if policy == "support" else x))
    out = algorithm(batch)
    assert out.norm == policy
    assert_close(out.query_losses, expected)
    every = list(params.values())
    assert_close(derivatives(out.query_losses, every), derivatives(expected, every))
    assert_close(algorithm.adapt(batch.support)(batch.query.x), out.query_outputs)
    if policy == "running":
        passes = [torch.stack([enter(x).mean(0) for x in part.x]).mean(0) for part in (*batch, batch.support)]
        running = torch.zeros(5).double()
        for mean in passes:  # of forward, then of adapt
            running = 0.9 * running + 0.1 * mean
        assert_close(norm.running_mean, running)
    else:
        assert norm.running_mean.eq(0).all()
    algorithm.eval()
    if policy == "running":
        expected = losses(lambda x, support: (norm.running_mean, norm.running_var))
    assert_close(algorithm(batch).query_losses, expected)
