"""Vectorized tasks equal a Python loop, or fall back to it with one warning."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metagrad as mg
from metagrad.meta.objective.vmap import losses_stacked
from metagrad.tasks import Batch, Examples
from tests.draws import draw
from tests.functions import Exponential
from tests.marks import fast

TASKS, SHOTS = 3, 4


def examples(seed: int) -> Examples:
    return Examples(draw(TASKS, SHOTS, 5, seed=seed), draw(TASKS, SHOTS, 2, seed=seed + 1))


def lookups(seed: int) -> Examples:
    ids = torch.randint(4, (TASKS, SHOTS, 3), generator=torch.Generator().manual_seed(seed))
    return Examples(ids, draw(TASKS, SHOTS, 2, seed=seed))


def sequences(seed: int) -> Examples:
    return Examples(draw(TASKS, SHOTS, 3, 4, seed=seed), draw(TASKS, SHOTS, 3, 4, seed=seed + 1))


def grids(seed: int) -> Examples:
    return Examples(draw(TASKS, SHOTS, 3, 5, seed=seed), draw(TASKS, SHOTS, 3, 2, seed=seed + 1))


def classes(seed: int) -> Examples:
    return Examples(draw(TASKS, SHOTS, 5, seed=seed), torch.arange(SHOTS).repeat(TASKS, 1) % 2)


class Doubling(nn.Linear):
    """A subclass with another forward, which must not be treated as a Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def changed_layer(change: Callable[[nn.Linear], object]) -> Callable[[], nn.Module]:
    """Return a function for a network with one changed layer."""

    def make() -> nn.Module:
        layer = nn.Linear(4, 4)
        change(layer)
        return nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Sequential(layer, nn.Linear(4, 2)))

    return make


LAYERS = {
    "as it is": changed_layer(lambda layer: None),
    "frozen weight": changed_layer(lambda layer: layer.weight.requires_grad_(False)),
    "frozen bias": changed_layer(lambda layer: layer.bias.requires_grad_(False)),
    "without bias": changed_layer(lambda layer: layer.register_parameter("bias", None)),
    "forward hook": changed_layer(lambda layer: layer.register_forward_hook(lambda module, args, y: 3 * y)),
    "parametrized": changed_layer(
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    ),
    "subclass": lambda: Doubling(5, 2),
    "norm": lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 2)),
}
FLAT = {
    "flatten": lambda: nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Flatten(), nn.Linear(5, 2)),
    "prelu": lambda: nn.Sequential(nn.Linear(5, 2), nn.PReLU(2)),
    "softmax": lambda: nn.Sequential(nn.Linear(5, 2), nn.Softmax(1)),
}
LOSSES = {
    "l1_loss": (F.l1_loss, examples),
    "MSELoss": (nn.MSELoss(), examples),
    "cross_entropy": (F.cross_entropy, classes),
    "partial": (functools.partial(F.cross_entropy), classes),
    "label smoothing": (functools.partial(F.cross_entropy, label_smoothing=0.1), classes),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), classes),
}


class Calling(nn.Module):
    """A small network whose forward is a function of the module and the input."""

    def __init__(self, forward: Callable[[Calling, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.calls, self.seen = 0, []
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(draw(4, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, padding_idx=0).tanh().mean(1)


def hidden(module: Calling, x: Tensor) -> Tensor:
    return module.first(x).tanh()


def reversed_gradient(module: Calling, x: Tensor) -> Tensor:
    h = hidden(module, x)
    if h.requires_grad:
        h.register_hook(lambda gradient: -gradient)
    return module.last(h)


def reversed_by_node(module: Calling, x: Tensor) -> Tensor:
    h = hidden(module, x)
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda grads, _: tuple(-g for g in grads))
    return module.last(h)


def counted_in_buffer(module: Calling, x: Tensor) -> Tensor:
    module.count.add_(1)
    return module.last(hidden(module, x)) * module.count.item()


def counted_in_rebound_buffer(module: Calling, x: Tensor) -> Tensor:
    module.count = module.count + 1
    return module.last(hidden(module, x)) * module.count


def counted_in_attribute(module: Calling, x: Tensor) -> Tensor:
    module.calls += 1
    return module.last(hidden(module, x)) * module.calls


def counted_in_list(module: Calling, x: Tensor) -> Tensor:
    module.seen.append(0)
    return module.last(hidden(module, x)) * len(module.seen)


def carried(module: Calling, x: Tensor) -> Tensor:
    h = hidden(module, x) + getattr(module, "before", 0.0)
    module.before = h.detach()
    return module.last(h)


def counted_outside() -> Calling:
    calls = [0]

    def forward(module: Calling, x: Tensor) -> Tensor:
        calls[0] += 1
        return module.last(hidden(module, x)) * calls[0]

    return Calling(forward)


def scattered(module: Calling, x: Tensor) -> Tensor:
    h = hidden(module, x)
    return module.last(torch.select_scatter(torch.ones_like(h), h[0], 0, 1))


def with_module_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    model[1].register_full_backward_hook(lambda module, into, out: (2 * into[0],))
    return model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(-1))[0][:, -1]


def by_sign(module: Calling, x: Tensor) -> Tensor:
    y = module.last(hidden(module, x))
    return y if x.sum() > 0 else -y


def behind_dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), Calling(by_sign))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    reason: str | None = None  # None means that the tasks are vectorized
    examples: Callable[[int], Examples] = examples
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        self.count.add_(1)
        return F.mse_loss(prediction, target) * self.count.item()


def of(forward: Callable[[Calling, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return functools.partial(Calling, forward)


GRIDS = {f"{name}, grids": Case(make, examples=grids) for name, make in LAYERS.items()}
CASES = {
    "F.embedding(padding_idx)": Case(Padded, None, lookups),
    "nn.Embedding(padding_idx)": Case(
        lambda: nn.Sequential(nn.Embedding(4, 2, padding_idx=0), nn.Flatten(), nn.Linear(6, 2)), None, lookups
    ),
    "nn.EmbeddingBag": Case(lambda: nn.EmbeddingBag(4, 2, padding_idx=0), None, lookups),
    "attention in eval mode": Case(Attention, None, sequences),
    "recurrent": Case(
        lambda: Recurrent(1, 2, batch_first=True), r"no rule for Recurrent \(the model itself\)"
    ),
    "running statistics": Case(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        r"BatchNorm1d \(1\) updates running statistics",
    ),
    "control flow": Case(behind_dropout, "torch.vmap cannot take the model.*data-dependent control flow"),
    "backward hook": Case(with_module_hook, r"backward hooks of Tanh \(1\)"),
    "hook on a tensor": Case(of(reversed_gradient), "cannot register a hook"),
    "hook on a node": Case(of(reversed_by_node), "asks for the graph of a tensor"),
    "buffer written": Case(of(counted_in_buffer), "writes its buffer 'count'"),
    "buffer rebound": Case(of(counted_in_rebound_buffer), "writes its buffer 'count'"),
    "attribute": Case(of(counted_in_attribute), "changes its attribute 'calls'"),
    "list": Case(of(counted_in_list), "changes its attribute 'seen'"),
    "state carried on": Case(of(carried), "changes its attribute 'before'"),
    "operation": Case(of(scattered), "loses the gradient of torch.select_scatter"),
    "loss with a buffer": Case(
        lambda: nn.Linear(5, 2),
        r"CountingLoss \(the module itself\) writes its buffer",
        loss_fn=CountingLoss(),
    ),
    **{name: Case(make) for name, make in (LAYERS | FLAT).items()},
    **GRIDS,
    **{name: Case(LAYERS["as it is"], None, draws, loss) for name, (loss, draws) in LOSSES.items()},
}
SECOND_ORDER_MISSING = {"nn.EmbeddingBag"}
NOT_REPEATABLE = {"attribute", "list", "loss with a buffer", "buffer written", "state carried on"}
REPEATABLE = CASES.keys() - SECOND_ORDER_MISSING - NOT_REPEATABLE


class Outcome(NamedTuple):
    loss: Tensor
    grads: list[Tensor]
    state: dict[str, Tensor]


def outcome(case: Case, **options) -> Outcome:
    torch.manual_seed(0)
    model, loss_fn = case.make().double(), copy.deepcopy(case.loss_fn)
    maml = mg.MAML(model, loss_fn, inner=mg.optim.rules.sgd(lr=0.1), steps=2, **options)
    batch = Batch(case.examples(0), case.examples(2))
    losses = []
    for _ in range(2):
        loss = maml(batch).loss
        loss.backward()
        losses.append(loss.detach())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return Outcome(torch.stack(losses), grads, model.state_dict())


def assert_as_in_a_loop(case: Case, **options) -> None:
    expected = outcome(case, task_chunk=1, **{k: v for k, v in options.items() if k != "compile"})
    if case.reason is None:
        found = outcome(case, **options)
    else:
        with pytest.warns(UserWarning, match=case.reason) as caught:
            found = outcome(case, **options)
        assert sum("one by one" in str(w.message) for w in caught) == 1
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    ("name", "order"),
    [(name, 1 if name in SECOND_ORDER_MISSING else 2) for name in CASES],
)
def test_stacked_tasks_are_those_of_a_loop(name, order):
    assert_as_in_a_loop(CASES[name], order=order)


@pytest.mark.parametrize("name", fast(REPEATABLE - LOSSES.keys() - GRIDS.keys(), sorted(REPEATABLE)))
def test_checkpointed_steps_are_those_of_a_loop(name):
    assert_as_in_a_loop(CASES[name], memory="step")


def maml_of(model: nn.Module, **options) -> mg.MAML:
    return mg.MAML(model.double(), F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, **options)


BATCH = Batch(examples(0), examples(2))


def test_a_counter_outside_of_the_model_shows_in_the_numbers():
    with pytest.warns(UserWarning, match="its loss is another one when it is called again"):
        maml_of(counted_outside())(BATCH)


@pytest.mark.parametrize(("name", "number"), [("random", random.random), ("numpy.random", np.random.rand)])
def test_numbers_of_other_generators_are_drawn_for_each_task(name, number):
    model = Calling(lambda module, x: module.last(hidden(module, x)) * number())
    with pytest.warns(UserWarning, match=f"draws from {name}"):
        maml_of(model)(BATCH)


def test_the_examination_leaves_nothing_behind():
    model = Calling(counted_in_buffer)
    model.seen, before = [1], torch.get_rng_state()
    maml = maml_of(model)
    with pytest.warns(UserWarning, match="writes its buffer"):
        maml(BATCH)
    assert model.count == TASKS * 3  # two inner steps and the query loss of each
    assert model.seen == [1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_its_own_is_left_where_it_was():
    generator = torch.Generator().manual_seed(3)
    model = Calling(
        lambda module, x: (
            module.last(hidden(module, x)) * torch.rand((), generator=generator, dtype=torch.float64)
        )
    )
    maml_of(model)(BATCH)
    found = torch.rand((), generator=generator)
    generator.manual_seed(3)
    for _ in range(3):
        torch.vmap(
            lambda x: x + torch.rand((), generator=generator, dtype=torch.float64), randomness="different"
        )(draw(TASKS))
    assert found == torch.rand((), generator=generator)


def hook_everywhere(module: nn.Module, out: tuple) -> None:
    pass


CHANGES = {
    "flag": lambda model: setattr(model, "flag", True),
    "hook": lambda model: model.last.register_full_backward_pre_hook(hook_everywhere),
    "global hook": lambda model: nn.modules.module.register_module_full_backward_pre_hook(hook_everywhere),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_is_examined_again(change):
    def forward(module: Calling, x: Tensor) -> Tensor:
        return (reversed_gradient if module.flag else lambda m, x: m.last(hidden(m, x)))(module, x)

    model = Calling(forward)
    model.flag = False
    maml = maml_of(model)
    maml(BATCH)
    handle = CHANGES[change](model)
    try:
        with pytest.warns(UserWarning, match="one by one"):
            maml(BATCH)
    finally:
        if handle is not None:
            handle.remove()


def test_a_buffer_that_is_written_later_is_an_error():
    def forward(module: Calling, x: Tensor) -> Tensor:
        if module.calls > 2:
            module.count.add_(1)
        return module.last(hidden(module, x))

    model = Calling(forward)
    maml = maml_of(model)
    maml(BATCH)
    model.calls = 3
    with pytest.raises(RuntimeError, match="did not do when it was examined"):
        maml(BATCH)


def test_a_later_batch_that_vmap_does_not_take_runs_in_a_loop():
    def forward(module: Calling, x: Tensor) -> Tensor:
        y = module.last(hidden(module, x))
        return y * 2 if len(x) == SHOTS - 1 and y.sum() > 0 else y

    few = Batch(*(Examples(part.x[:, 1:], part.y[:, 1:]) for part in BATCH))
    maml, loop = maml_of(Calling(forward)), maml_of(Calling(forward), task_chunk=1)
    loop.load_state_dict(maml.state_dict())
    torch.testing.assert_close(maml(BATCH).loss, loop(BATCH).loss)
    with pytest.warns(UserWarning, match="one by one, because torch.vmap cannot take"):
        torch.testing.assert_close(maml(few).loss, loop(few).loss)
    torch.testing.assert_close(maml(BATCH).loss, loop(BATCH).loss)


@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=str)
def test_a_custom_function_runs_eagerly_and_is_named_once(options):
    def forward(module: Calling, x: Tensor) -> Tensor:
        return module.last(Exponential.apply(hidden(module, x)))

    maml, written = (maml_of(Calling(f)) for f in (forward, lambda m, x: m.last(hidden(m, x).exp())))
    maml = maml_of(maml.model, **options)
    written.load_state_dict(maml.state_dict())
    with pytest.warns(UserWarning, match="custom autograd.Function Exponential") as caught:
        losses = [maml(BATCH).loss for _ in range(2)]
    assert [str(w.message).split(":")[0] for w in caught] == ["MAML", "MAML(..., compile)"][
        : 1 + len(options)
    ]
    assert "metagrad.preflight" in str(caught[0].message)
    found, expected = (
        torch.autograd.grad(value, list(learner.parameters()))
        for value, learner in ((losses[1], maml), (written(BATCH).loss, written))
    )
    torch.testing.assert_close(found, expected)


def test_an_attribute_that_is_set_once_is_no_hindrance():
    def forward(module: Calling, x: Tensor) -> Tensor:
        if not hasattr(module, "scale"):
            module.scale = torch.ones(x.shape[-1], dtype=torch.float64)
        module.shape = x.shape
        return module.last(hidden(module, x * module.scale))

    maml_of(Calling(forward))(BATCH)


@pytest.mark.parametrize("memory", ["full", "step"])
def test_a_sparse_inner_gradient_says_what_to_do(memory):
    class Looked(Padded):
        def forward(self, ids):
            return F.embedding(ids, self.table, sparse=True).mean(1)

    maml = maml_of(Looked(), task_chunk=1, memory=memory)
    with pytest.raises(ValueError, match=r"gradient of 'table' is a sparse tensor.*Pass sparse=\['table'\]"):
        maml(Batch(lookups(0), lookups(2)))


def test_cross_entropies_of_many_examples_in_float16():
    """The sum overflows although the mean does not."""
    logits = torch.tensor([0.0, 12.0]).half().expand(2, 6000, 2)
    losses = losses_stacked(F.cross_entropy, logits, torch.zeros(2, 6000, dtype=torch.int64))
    assert losses.tolist() == [12.0, 12.0]
    assert losses.dtype == torch.float16
