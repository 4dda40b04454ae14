"""Proto-MAML against a loop over tasks, and as the prototypical network that it starts from."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import covering
from tests.meta.textbook import assert_close, assert_learns_as, gradients, textbook

WAYS = 3
sgd = mg.optim.rules.sgd


class Net(nn.Module):
    """A classifier whose embedding is no output of a module."""

    def __init__(self, bias=True, calls=1):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.calls = nn.Linear(2, 4), calls
        self.head = nn.Linear(4, WAYS, bias=bias)
        self.double()

    def embedding(self, x):
        return torch.tanh(self.enter(x)).sin()

    def forward(self, x):
        return 0.5 * torch.stack([self.head(self.embedding(x)) for _ in range(self.calls)]).mean(0)


def draw(tasks, labels):
    labels = torch.tensor(labels)
    generator = torch.Generator().manual_seed(len(labels))
    x = torch.randn(tasks, len(labels), 2, generator=generator, dtype=torch.float64)
    shuffled = torch.stack([labels[torch.randperm(len(labels), generator=generator)] for _ in range(tasks)])
    return Examples(x + shuffled.unsqueeze(-1), shuffled)


@pytest.fixture
def batch():
    """Tasks with classes of unequal size."""
    return Batch(draw(4, [0, 0, 0, 1, 2, 2]), draw(4, [0, 1, 2, 2, 1]))


def prototypes(model, x, y):
    """Return the head that compares with the mean embedding of each class."""
    h = model.embedding(x)
    means = torch.stack([h[y == k].mean(0) for k in range(WAYS)])
    return {"head.weight": 2 * means, "head.bias": -means.pow(2).sum(1)}


def make(model=None, **options):
    return mg.ProtoMAML(model or Net(), F.cross_entropy, **{"inner": sgd(lr=0.3), "steps": 3, **options})


def is_fast(memory, order, task_chunk):
    return memory == ("full" if order == 2 else "step") and task_chunk != 3


@pytest.mark.parametrize(
    ("memory", "order", "task_chunk"),
    covering(["full", "step", "sqrt", "160KiB"], [1, 2], [None, 1, 3], fast=is_fast),
)
def test_meta_gradient_equals_the_textbook_loop(batch, memory, order, task_chunk):
    proto = make(memory=memory, order=order, task_chunk=task_chunk)
    how = {"lr": 0.3, "steps": 3, "order": order, "start": prototypes}
    losses = textbook(proto.model, F.cross_entropy, batch, **how)
    found = assert_learns_as(proto(batch), losses, proto.model.parameters())
    assert float(found[0].norm()) > 1e-3
    assert not any(float(g.norm()) for g in found[2:])


@pytest.mark.parametrize(("order", "task_chunk"), [(1, None), (2, 1), (2, None)])
def test_a_head_that_adapts_alone(batch, task_chunk, order):
    """The shared body is a part of the start and of every loss."""
    proto = make(adapt="head", memory="step", task_chunk=task_chunk, order=order)
    how = {"lr": 0.3, "steps": 3, "order": order, "start": prototypes, "names": ["head.weight", "head.bias"]}
    losses = textbook(proto.model, F.cross_entropy, batch, **how)
    assert_learns_as(proto(batch), losses, proto.model.parameters())


def test_without_steps_it_is_the_prototypical_network(batch):
    body, head = nn.Linear(2, 4), nn.Linear(4, WAYS)
    learner, (x, y) = make(nn.Sequential(body, head).double(), head="1"), batch.support
    with torch.no_grad():
        logits = learner(batch, steps=0).query_outputs
        for i in range(4):
            prototypes = torch.stack([body(x[i, y[i] == k]).mean(0) for k in range(WAYS)])
            distances = torch.cdist(body(batch.query.x[i]), prototypes)
            torch.testing.assert_close(logits[i].log_softmax(-1), (-distances.square()).log_softmax(-1))


def test_padding_belongs_to_no_class(batch):
    padded = Examples(
        F.pad(batch.support.x, (0, 0, 0, 2), value=7.0), F.pad(batch.support.y, (0, 2), value=-100)
    )
    learner = make()
    torch.testing.assert_close(learner(Batch(padded, batch.query)).loss, learner(batch).loss)


def test_prototypes_stay_in_float32(batch):
    batch = Batch(*(Examples(part.x.float(), part.y) for part in batch))
    learner = make(Net().float())
    with torch.autocast("cpu", torch.bfloat16):
        fast = learner.adapt(batch.support)
    assert {p.dtype for p in fast.params.values()} == {torch.float32}


def test_prototypes_of_many_examples_in_float16():
    """The sum of the embeddings of a class overflows, and their mean does not."""
    model, x = nn.Sequential(nn.Identity(), nn.Linear(1, 2)).half(), torch.full((1, 1000, 1), 200.0).half()
    start = make(model, head="1", steps=0).adapt((x, (torch.arange(1000) % 2).unsqueeze(0))).params
    assert start["1.weight"].tolist() == [[[400.0], [400.0]]]
    assert start["1.bias"].tolist() == [[-40000.0, -40000.0]]
    assert {value.dtype for value in start.values()} == {torch.float16}


def test_a_head_that_is_called_otherwise(batch):
    with pytest.raises(ValueError, match=r"must call the head once, .*, \(6, 4\), but it was called 2 times"):
        make(Net(calls=2))(batch)


@pytest.mark.parametrize("change", ["frozen", "not adapted", "parametrized"])
def test_a_head_that_is_not_adapted_is_an_error(batch, change):
    net = Net()
    if change == "frozen":
        net.head.weight.requires_grad_(False)
    if change == "parametrized":
        nn.utils.parametrizations.orthogonal(net.head)
    adapt = "enter" if change == "not adapted" else None
    learner = mg.ProtoMAML(net, F.cross_entropy, inner=sgd(lr=0.1), steps=1, adapt=adapt)
    with pytest.raises(ValueError, match=r"ProtoMAML\(..., head\): .*but its weight is not adapted"):
        learner(batch)


@pytest.mark.parametrize("norm", ["transductive", "support", "running", "per_step"])
def test_policies_for_statistics(batch, norm):
    """The policy normalizes the embeddings of the prototypes, vectorized and in a loop."""
    found = []
    for task_chunk in (None, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, WAYS)).double()
        learner = make(model, head="3", norm=norm, task_chunk=task_chunk)
        out = learner(batch)
        buffers = [buffer.double() for buffer in learner.buffers()]
        found.append((out.loss, *gradients(out.loss, learner.parameters()), *buffers))
    assert_close(*found)
