"""Models with several inputs and outputs: dicts, tuples, dataclasses, in the style of Hugging Face."""

import abc
import dataclasses
import types
import warnings
from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.meta.textbook import textbook

sgd = mg.optim.rules.sgd


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    name: str = "output"


class ModelOutput(OrderedDict):
    """A dict whose entries that are not None are also attributes, as in Hugging Face's library."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(cls)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Classified(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None


class Pair(NamedTuple):
    logits: Tensor
    extra: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor
    nested: dict


class Cache(abc.ABC):  # noqa: B024
    """A container of a class of its own, as the key-value cache of a language model."""

    def __init__(self, logits):
        self.logits, self.layers = logits, [types.SimpleNamespace(keys=logits + 1)]


RETURNS = {
    "object": Cache,
    "dataclass": lambda z: Output(z, (z.square(), z)),
    "frozen dataclass": lambda z: Frozen(z, {"other": [z + 1, 2]}),
    "model output": lambda z: Classified(logits=z),
    "dict": lambda z: {"logits": z, "mask": z > 0, "none": None},
    "tuple": lambda z: (z, (z.sum(),)),
    "named tuple": lambda z: Pair(z, z.mean()),
    "namespace": lambda z: types.SimpleNamespace(logits=z),
}


class TextModel(nn.Module):
    """``model(input_ids=..., attention_mask=...)``."""

    def __init__(self, returns=RETURNS["model output"]):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 4)
        self.head = nn.Linear(4, 3)
        self.returns = returns
        self.double()

    def forward(self, input_ids, attention_mask=None, scale=1.0):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vectors = torch.tanh(self.embedding(input_ids)) * mask.unsqueeze(-1)
        return self.returns(scale * self.head(vectors.sum(1) / mask.sum(1, keepdim=True)))


def logits_of(output):
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output.logits


def loss_fn(output, labels):
    return F.cross_entropy(logits_of(output), labels)


def draw(tasks=3, count=4):
    torch.manual_seed(1)

    def examples():
        ids, mask = torch.randint(20, (tasks, count, 5)), torch.rand(tasks, count, 5) > 0.3
        mask[..., 0] = True
        return Examples({"input_ids": ids, "attention_mask": mask}, torch.randint(3, (tasks, count)))

    return Batch(examples(), examples())


class OfTensors(nn.Module):
    """The same model for one tensor that contains ids and masks."""

    def __init__(self):
        super().__init__()
        self.model = TextModel(lambda z: z)

    def forward(self, x):
        return self.model(x[..., :5], x[..., 5:])


def as_tensors(batch):
    join = lambda e: Examples(torch.cat([e.x["input_ids"], e.x["attention_mask"].long()], -1), e.y)  # noqa: E731
    return Batch(*map(join, batch))


def run(model, loss_fn, batch, **options):
    maml = mg.MAML(model, loss_fn, **{"inner": sgd(lr=0.3), "steps": 2, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = maml(batch)
    return out, list(torch.autograd.grad(out.loss, list(model.parameters())))


WAYS = [
    *((returns, {}) for returns in RETURNS),
    ("dict", {"task_chunk": 2, "memory": "step"}),
    ("dataclass", {"task_chunk": 1, "order": 1, "memory": "step"}),
    ("model output", {"order": 1}),
    ("model output", {"task_chunk": 1, "memory": "sqrt", "nonfinite": "skip"}),
    ("model output", {"memory": "64MiB"}),
]


@pytest.mark.parametrize(("returns", "options"), WAYS, ids=str)
def test_what_the_model_returns_reaches_the_loss_as_it_is(returns, options):
    batch = draw()
    out, grads = run(TextModel(RETURNS[returns]), loss_fn, batch, **options)
    order = options.get("order", 2)
    expected, expected_grads = run(OfTensors(), F.cross_entropy, as_tensors(batch), task_chunk=1, order=order)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-13)
    assert type(out.query_outputs) is type(RETURNS[returns](torch.zeros(1)))
    torch.testing.assert_close(logits_of(out.query_outputs), expected.query_outputs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_tables_by_rows_with_several_inputs(task_chunk):
    model = TextModel()
    maml = mg.MAML(
        model, loss_fn, inner=sgd(lr=0.3), steps=2, sparse=["embedding.weight"], task_chunk=task_chunk
    )
    out = maml(draw())
    grads = torch.autograd.grad(out.loss, list(model.parameters()))
    _, expected = run(OfTensors(), F.cross_entropy, as_tensors(draw()))
    torch.testing.assert_close([g.to_dense() for g in grads[:1]] + [*grads[1:]], expected)
    fast, batch = maml.adapt(draw().support), draw()
    torch.testing.assert_close(fast(batch.query.x).logits, out.query_outputs.logits)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_an_adapted_model_takes_and_returns_the_same(task_chunk):
    maml = mg.MAML(TextModel(), loss_fn, inner=sgd(lr=0.3), steps=2, task_chunk=task_chunk)
    batch = draw()
    fast, out = maml.adapt(batch.support), maml(batch)
    for x in (batch.query.x, UserDict(batch.query.x), tuple(batch.query.x.values())):
        predicted = fast(x)
        assert isinstance(predicted, Classified)
        assert predicted.logits is predicted["logits"]
        assert predicted.loss is None
        torch.testing.assert_close(predicted.logits, out.query_outputs.logits)


def test_a_batch_of_plain_pairs_or_dicts(regression):
    model = nn.Linear(2, 3).double()
    maml = mg.MAML(model, F.mse_loss, inner=sgd(lr=0.1), steps=2)
    expected = textbook(model, F.mse_loss, regression, lr=0.1, steps=2).mean()
    (xs, ys), (xq, yq) = regression
    for batch in (
        ((xs, ys), (xq, yq)),
        [[xs, ys], [xq, yq]],
        {"support": {"x": xs, "y": ys}, "query": (xq, yq)},
        types.SimpleNamespace(support={"y": ys, "x": xs}, query=types.SimpleNamespace(x=xq, y=yq)),
    ):
        torch.testing.assert_close(maml(batch).loss, expected)
    torch.testing.assert_close(maml.adapt((xs, ys)).support_losses, maml(regression).support_losses)


def test_targets_and_inputs_may_be_nested(regression):
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(2, 3).double()

        def forward(self, x, inputs, scale):
            return {"first": self.linear(x + inputs[0]) * scale["by"], "shift": inputs[1]["b"]}

    def nested(e):
        x = (e.x / 3, [e.x * 2 / 3, {"b": torch.ones(4).double()}], {"by": 1.0})
        return Examples(x, {"target": e.y, "weight": torch.ones(4).double()})

    def loss_fn(output, target):
        assert output["shift"].shape == target["weight"].shape == ()
        return F.mse_loss(output["first"], target["target"]) * target["weight"] * output["shift"]

    batch = Batch(*map(nested, regression))
    for task_chunk in (None, 1):
        model = Add()
        _, grads = run(model, loss_fn, batch, inner=sgd(lr=0.1), task_chunk=task_chunk)
        expected = textbook(model.linear, F.mse_loss, regression, lr=0.1, steps=2).mean()
        torch.testing.assert_close(grads, list(torch.autograd.grad(expected, list(model.parameters()))))
