from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import metagrad as mg
from metagrad.core.modules import ModuleContents
from metagrad.tasks import Batch, Examples
from tests.marks import fast, slow

rules = mg.optim.rules


def draw_batch(seed=0, tasks=4):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(s, generator=generator, dtype=torch.float64)  # noqa: E731
    return Batch(
        Examples(draw(tasks, 6, 2), draw(tasks, 6, 1)), Examples(draw(tasks, 5, 2), draw(tasks, 5, 1))
    )


def perceptron(*layers):
    model = nn.Sequential(*layers or (nn.Linear(2, 1), nn.Tanh())).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return model


class Custom(nn.Module):
    """What only vmap can stack: a layer called twice, tied weights, a frozen gain, a buffer."""

    shift: torch.Tensor

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.enter, self.mix, self.tied = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.tied.weight = self.mix.weight
        self.gain = nn.Parameter(torch.full((3,), 1.5), requires_grad=False)
        self.register_buffer("shift", torch.full((3,), 0.25))
        self.leave = nn.Linear(3, 1)
        self.double()

    def forward(self, x):
        h = torch.tanh(self.enter(x)) * self.gain + self.shift
        return self.leave(self.tied(torch.tanh(self.mix(self.mix(h)))))


def meta_gradient(maml, batch, *, second=False, weights=None, **how):
    params = list(maml.parameters())
    params = [p for p in params if p.requires_grad]
    out = maml(batch, **how)
    loss = (
        out.loss
        if weights is None
        else (out.query_losses * weights).sum() + out.support_losses.square().sum()
    )
    grads = torch.autograd.grad(loss, params, create_graph=second, materialize_grads=True)
    if not second:
        return grads
    assert all(gradient.requires_grad for gradient in grads)
    return torch.autograd.grad(
        torch.stack([gradient.pow(3).sum() for gradient in grads]).sum(), params, materialize_grads=True
    )


def pair(model, rule, options=None, loss_fn=F.mse_loss, **how):
    options = {"backend": "eager", "whole": False, **(options or {})}
    eager = mg.MAML(model, loss_fn, inner=rule, **how)
    return mg.MAML(model, loss_fn, inner=rule, compile=options, **how), eager


def assert_same(got, expected, rtol=1e-10):
    scale = max(float(e.abs().max()) for e in expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * scale)


def learned(value):
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


RULES = {
    "sgd": lambda: rules.sgd(lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda: rules.adam(lr=0.05, weight_decay=0.1),
    "rmsprop": lambda: rules.rmsprop(lr=0.05),
    "adagrad": lambda: rules.adagrad(lr=0.05, lr_decay=0.1),
    "a value for each step": lambda: rules.sgd(lr=[0.1, 0.2, 0.3]),
    "learned": lambda: rules.sgd(lr=learned(0.1), momentum=learned(0.5)),
    "learned for each step": lambda: rules.sgd(lr=learned([0.1, 0.2, 0.3])),
    "learned for each parameter": lambda: rules.sgd(
        lr={
            name: nn.Parameter(learned(0.1).data.expand_as(p).clone())
            for name, p in perceptron().named_parameters()
        }
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "step": {"memory": "step"},
    "sqrt": {"memory": "sqrt"},
    "budget": {"memory": "1MiB"},
    "truncate": {"truncate": 2},
    "tolerance": {"tolerance": 1.0},
    "one by one": {"task_chunk": 1},
    "in parts": {"task_chunk": 2},
    "in parts, tolerance": {"task_chunk": 2, "tolerance": 1.0},
}


# The others are compositions of what this and tests below compile: state, values by parameter and by step.
@pytest.mark.parametrize("rule", fast(("learned for each parameter",), RULES))
def test_every_rule_equals_eager(rule):
    compiled, eager = pair(perceptron(), RULES[rule](), {"whole": None}, steps=3, memory="step")
    for second in (False, True):
        batch = draw_batch(int(second))
        assert_same(meta_gradient(compiled, batch, second=second), meta_gradient(eager, batch, second=second))
    assert graphs_of_meta_batches(compiled) == 0  # which would keep every step


@pytest.mark.parametrize("way", fast(("in parts, tolerance",), WAYS))
def test_every_way_equals_eager(way):
    compiled, eager = pair(perceptron(), rules.sgd(lr=0.1, momentum=0.9), steps=3, **WAYS[way])
    weights = torch.linspace(0.1, 1, 4, dtype=torch.float64)
    hows: list[dict[str, Any]] = [{"weights": weights}, {"second": True}, {"steps": 1}]
    for how in hows:
        batch = draw_batch(1)
        assert_same(meta_gradient(compiled, batch, **how), meta_gradient(eager, batch, **how))


def test_a_model_that_only_vmap_can_stack():
    compiled, eager = pair(Custom(), rules.sgd(lr=0.1), steps=2)
    assert_same(meta_gradient(compiled, draw_batch()), meta_gradient(eager, draw_batch()))


@pytest.mark.parametrize(
    ("rule", "way"),
    [
        slow("adam", "full"),
        slow("learned", "truncate"),
        ("a value for each step", "tolerance"),
        slow("sgd", "one by one"),
    ],
)
def test_the_whole_meta_gradient_equals_eager(rule, way):
    compiled, eager = pair(perceptron(), RULES[rule](), {"whole": True}, steps=2, **WAYS[way])
    weights = torch.linspace(0.1, 1, 4, dtype=torch.float64)
    hows: list[dict[str, Any]] = [{}, {"weights": weights}, {"second": True}]
    for how in hows:
        assert_same(meta_gradient(compiled, draw_batch(), **how), meta_gradient(eager, draw_batch(), **how))


def test_the_whole_of_a_rule_that_counts_the_axes_of_tasks():
    """It was asked for its last step on parameters without these axes, failed, and ran as it is, one by one."""
    rule = rules.chain(rules.clip_by_norm(0.5), rules.sgd(lr=0.1))
    compiled, eager = pair(perceptron(), rule, {"whole": True}, steps=1)
    assert_same(meta_gradient(compiled, draw_batch()), meta_gradient(eager, draw_batch()))


def test_no_steps():
    compiled, eager = pair(perceptron(), rules.sgd(lr=0.1), steps=0)
    assert_same(meta_gradient(compiled, draw_batch()), meta_gradient(eager, draw_batch()))


@pytest.mark.parametrize("options", [{}, slow({"whole": True})])
def test_first_order(options):
    compiled, eager = pair(perceptron(), rules.sgd(lr=0.1), options, steps=2, order=1)
    assert_same(meta_gradient(compiled, draw_batch()), meta_gradient(eager, draw_batch()))


@pytest.fixture(scope="module")
def by_steps():
    return pair(perceptron(), rules.sgd(lr=0.1), steps=3, memory="step")


@pytest.mark.parametrize("whole", [False, slow(True)])
def test_outputs_and_adaptation_equal_eager(by_steps, whole):
    compiled, eager = pair(perceptron(), rules.sgd(lr=0.1), {"whole": True}, steps=3) if whole else by_steps
    batch = draw_batch()
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            got, expected = compiled(batch), eager(batch)
            for field in dataclasses.fields(got):
                a, b = getattr(got, field.name), getattr(expected, field.name)
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
                assert b is None or a.requires_grad == b.requires_grad
            a, b = compiled.adapt(batch.support)(batch.query.x), eager.adapt(batch.support)(batch.query.x)
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", [{}, slow({"memory": "sqrt"}), slow({"task_chunk": 1})])
def test_nothing_is_compiled_again_for_other_values(how):
    backend = CompileCounterWithBackend("eager")
    model = perceptron()
    compiled, eager = pair(model, rules.adam(lr=0.1), {"backend": backend}, steps=5, **how)
    meta_gradient(compiled, draw_batch())
    count = backend.frame_count
    assert count > 0
    for seed, (steps, lr) in enumerate([(1, 0.1), (2, 0.2), (9, 0.3)]):
        for maml in (compiled, eager):
            maml.inner = rules.adam(lr=lr, betas=(0.8 + lr / 10, 0.99))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        batch = draw_batch(seed)
        assert_same(meta_gradient(compiled, batch, steps=steps), meta_gradient(eager, batch, steps=steps))
    assert backend.frame_count == count


class Scaled(nn.Module):
    """A layer whose output depends on a flag, a number, a buffer, a submodule, a tensor and an entry of a dict."""

    gain: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear, self.activation, self.scale = nn.Linear(2, 1), nn.Tanh(), 1.0
        self.dropout = nn.Dropout(0.5).eval()
        self.register_buffer("gain", torch.ones(()))
        self.slope, self.factors = torch.ones((), dtype=torch.float64), {"output": 1.0}
        self.double()

    def forward(self, x):
        scale = self.scale * self.gain * self.slope * (3 if self.training else 1)
        return self.dropout(self.activation(self.linear(x) * scale)) * self.factors["output"]


@pytest.fixture(scope="module")
def compiled_whole():
    """What tests that change the model share: how often it was compiled, a MAML of one graph, and an eager one."""
    torch.manual_seed(0)
    backend = CompileCounterWithBackend("eager")
    compiled, eager = pair(Scaled(), rules.sgd(lr=0.1), {"whole": True, "backend": backend}, steps=2)
    meta_gradient(compiled, draw_batch())
    assert backend.frame_count == 1
    return backend, compiled, eager


@pytest.fixture
def whole(compiled_whole):
    _, compiled, eager = compiled_whole
    contents, rule = ModuleContents(compiled.modules()), eager.inner
    yield compiled_whole
    contents.put_back()
    compiled.model.factors["output"] = 1.0
    compiled.inner, compiled._cache.compiled.gave_up = rule, False


def test_the_whole_is_not_compiled_again_for_other_values(whole):
    backend, compiled, eager = whole
    count = backend.frame_count
    compiled.inner = rules.sgd(lr=0.2)
    eager = mg.MAML(eager.model, F.mse_loss, inner=rules.sgd(lr=0.2), steps=2)
    assert_same(meta_gradient(compiled, draw_batch(1)), meta_gradient(eager, draw_batch(1)))
    assert backend.frame_count == count


def doubling(module, args, output):
    return output * 2


def hooked():
    model = perceptron()
    model[0].register_forward_hook(doubling)
    return model


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if self.bias.sum() > 0 else 1)


UNCOMPILABLE = {
    "hooks": (hooked, "Linear .0. has hooks"),
    "dropout": (
        lambda: perceptron(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1)),
        "random numbers are drawn",
    ),
    "running statistics": (
        lambda: perceptron(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        "running statistics",
    ),
    "control flow": (lambda: perceptron(Branching(2, 1)), "torch.compile cannot take it"),
}


@pytest.mark.parametrize("options", [{}, {"whole": True}])
@pytest.mark.parametrize("case", UNCOMPILABLE)
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(case, options):
    make, reason = UNCOMPILABLE[case]
    batch = draw_batch()
    compiled, _ = pair(make(), rules.sgd(lr=0.1), options, steps=2, task_chunk=1)
    _, eager = pair(make(), rules.sgd(lr=0.1), steps=2, task_chunk=1)
    torch.manual_seed(1)
    expected = meta_gradient(eager, batch)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"without being compiled, because .*{reason}"):
        got = meta_gradient(compiled, batch)
    assert_same(got, expected)
    for a, b in zip(compiled.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meta_gradient(compiled, batch)


def test_a_hook_that_comes_later_is_seen(whole):
    _, compiled, eager = whole
    before = meta_gradient(compiled, draw_batch())
    compiled.model.linear.register_forward_hook(doubling)
    with pytest.warns(UserWarning, match="has hooks"):
        got = meta_gradient(compiled, draw_batch())
    assert_same(got, meta_gradient(eager, draw_batch()))
    assert not torch.equal(got[0], before[0])


def test_a_model_in_another_mode_is_compiled_again(whole):
    _, compiled, _ = whole
    compiled.model.dropout.train()
    with pytest.warns(UserWarning, match="random numbers are drawn"):
        meta_gradient(compiled, draw_batch())


def test_tables_of_rows_run_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 3), nn.Flatten(), nn.Linear(6, 1)).double()
    ids = torch.arange(16).view(2, 4, 2)
    y = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4, 1)
    batch = Batch(Examples(ids, y), Examples(ids, y))
    compiled, eager = pair(model, rules.sgd(lr=0.1), steps=2, sparse=["0.weight"])
    with pytest.warns(UserWarning, match=r"only the rows of '0\.weight' are there"):
        got = compiled(batch).loss
    torch.testing.assert_close(got, eager(batch).loss)


@pytest.mark.parametrize("options", [{}, slow({"whole": True})])
def test_labels_are_checked_on_every_call(options):
    backend = CompileCounterWithBackend("eager")
    options = {**options, "backend": backend}
    compiled, _ = pair(
        perceptron(nn.Linear(2, 3)), rules.sgd(lr=0.1), options, loss_fn=F.cross_entropy, steps=2
    )
    x, counts = draw_batch().support.x, []

    def batch(highest):
        y = torch.arange(6).remainder(highest + 1).expand(4, 6)
        return Batch(Examples(x, y), Examples(x, y))

    with torch.no_grad():
        for highest in (1, 2):
            assert compiled(batch(highest)).loss.isfinite()
            counts.append(backend.frame_count)
        assert counts == counts[:1] * 2
        with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
            compiled(batch(3))


@pytest.mark.parametrize("options", [{}, slow({"whole": True})])
@pytest.mark.parametrize("lr", [[0.1, 0.2], slow(torch.tensor([0.1, 0.2], dtype=torch.float64))])
def test_a_step_beyond_the_last_value_is_refused(lr, options):
    compiled, _ = pair(perceptron(), rules.sgd(lr=lr), options, steps=2)
    with torch.no_grad():
        assert compiled(draw_batch()).loss.isfinite()
    with pytest.raises(ValueError, match=r"lr has one value for each of 2 steps, but this is step 2"):
        compiled(draw_batch(), steps=3)


def test_a_copy_compiles_for_itself_and_is_not_kept_alive_by_what_was_compiled(by_steps):
    compiled, eager = by_steps
    torch.testing.assert_close(compiled(draw_batch()).loss, eager(draw_batch()).loss)
    copied = copy.deepcopy(compiled)
    assert_same(meta_gradient(copied, draw_batch()), meta_gradient(eager, draw_batch()))
    assert copied._cache.compiled._advances
    alive = weakref.ref(copied.model), weakref.ref(copied.model[0].weight), weakref.ref(copied)
    del copied
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    kept = pickle.loads(pickle.dumps(compiled))._cache.compiled
    assert type(kept) is type(compiled._cache.compiled)


@pytest.mark.slow
def test_a_normalisation_by_the_batch(images):
    model = mg.models.Conv4(3, hidden=2, image_size=16).double()
    compiled, eager = pair(model, rules.sgd(lr=0.1), loss_fn=F.cross_entropy, steps=1)
    assert_same(meta_gradient(compiled, images), meta_gradient(eager, images), rtol=1e-9)


def test_options_that_mean_nothing():
    with pytest.raises(ValueError, match=r"MAML\(...\): compile must be"):
        mg.MAML(perceptron(), F.mse_loss, inner=rules.sgd(lr=0.1), steps=1, compile="all")  # type: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'compile="whole".*got memory=.step'):
        mg.MAML(perceptron(), F.mse_loss, inner=rules.sgd(lr=0.1), steps=1, compile="whole", memory="step")


def test_under_a_memory_tracker_it_runs_as_it_is(by_steps):
    compiled, eager = by_steps
    with mg.MemoryTracker(), pytest.warns(UserWarning, match="such as a MemoryTracker's on the CPU"):
        got = meta_gradient(compiled, draw_batch())
    assert_same(got, meta_gradient(eager, draw_batch()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = compiled(draw_batch())
    with mg.MemoryTracker(), pytest.warns(UserWarning, match="such as a MemoryTracker's on the CPU"):
        got = torch.autograd.grad(out.loss, list(compiled.parameters()))
    assert_same(got, meta_gradient(eager, draw_batch()))


@pytest.mark.slow
@pytest.mark.parametrize("compile", [True, "whole"])
def test_by_inductor(compile):
    maml = mg.MAML(perceptron(), F.mse_loss, inner=rules.sgd(lr=0.1), steps=3, compile=compile)
    eager = mg.MAML(maml.model, F.mse_loss, inner=rules.sgd(lr=0.1), steps=3)
    for seed in (0, 1):
        assert_same(meta_gradient(maml, draw_batch(seed)), meta_gradient(eager, draw_batch(seed)))


@pytest.mark.parametrize("options", [{}, slow({"whole": True})])
def test_cotangents_of_predictions_are_pulled_back_under_the_autocast_of_the_forward_pass(options):
    model, batch = perceptron().float(), draw_batch()
    batch = Batch(batch.support.to(dtype=torch.float32), batch.query.to(dtype=torch.float32))
    compiled, _ = pair(model, rules.sgd(lr=0.1), options, steps=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(batch)
        inside = torch.autograd.grad(
            out.query_outputs.float().square().sum(), model.parameters(), retain_graph=True
        )
    outside = torch.autograd.grad(out.query_outputs.float().square().sum(), model.parameters())
    assert_same(outside, inside, rtol=1e-6)


def graphs_of_meta_batches(maml):
    return len(maml._cache.compiled.meta_batch.gradient._kept)


def test_few_small_steps_are_one_graph_until_tasks_are_weighted_differently():
    compiled, eager = pair(perceptron(), rules.sgd(lr=0.1), {"whole": None}, steps=2)

    def assert_derivatives(**how):
        assert_same(meta_gradient(compiled, draw_batch(), **how), meta_gradient(eager, draw_batch(), **how))

    for how in ({}, {}, {"second": True}, {"steps": 6}):
        assert_derivatives(**how)
    assert not compiled._cache.compiled.by_steps
    weights = torch.linspace(0.1, 1, 4, dtype=torch.float64)
    for how in ({"weights": weights}, {"weights": weights}, {}):
        assert_derivatives(**how)
    assert compiled._cache.compiled.by_steps
    assert graphs_of_meta_batches(compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"steps": 6},
        {"memory": "step"},
        {"loss_fn": lambda p, y: sum(((p - y) ** 2).mean() for _ in range(30))},
    ],
)
def test_what_is_not_small_or_keeps_less_goes_by_steps(how):
    compiled, eager = pair(perceptron(), rules.sgd(lr=0.1), {"whole": None}, **{"steps": 2, **how})
    assert_same(meta_gradient(compiled, draw_batch()), meta_gradient(eager, draw_batch()))
    assert graphs_of_meta_batches(compiled) == 0


def turn_to_evaluation(model):
    model.eval()


def set_a_number(model):
    model.scale = 2.0


def rebind_a_buffer(model):
    model.gain = model.gain * 2


def rebind_a_tensor(model):
    model.slope = model.slope * 2


def replace_a_module(model):
    model.activation = nn.Sigmoid()


def add_a_hook(model):
    model.linear.register_forward_hook(lambda module, args, output: output * 2)


CHANGES = (turn_to_evaluation, set_a_number, rebind_a_buffer, rebind_a_tensor, replace_a_module, add_a_hook)


def scaled(**how):
    torch.manual_seed(0)
    return pair(Scaled(), rules.sgd(lr=0.1), {"whole": False}, steps=2, **how)


@pytest.mark.parametrize("is_whole", [True, slow(False)])
def test_what_changes_before_the_backward_pass_changes_no_derivative(whole, is_whole):
    compiled, eager = whole[1:] if is_whole else scaled()
    model, batch = compiled.model, draw_batch()
    weights, contents = torch.linspace(0.1, 1, 4, dtype=torch.float64), ModuleContents(model.modules())

    def derivatives(maml, change):
        contents.put_back()
        out = maml(batch)
        change(model)
        params, loss = list(maml.parameters()), (out.query_losses * weights).sum()
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        again = torch.autograd.grad(loss, params, create_graph=True)
        return [*grads, *torch.autograd.grad(sum(g.pow(3).sum() for g in again), params)]

    expected = derivatives(eager, lambda model: None)
    for change in CHANGES:
        assert_same(derivatives(compiled, change), expected)


@pytest.mark.parametrize("is_whole", [True, slow(False)])
def test_what_cannot_be_restored_for_the_backward_pass_is_refused(whole, is_whole):
    maml, _ = whole[1:] if is_whole else scaled(memory="step")
    losses = maml(draw_batch()).query_losses
    maml.model.factors["output"] = 2.0
    for create_graph in (False, True):
        with pytest.raises(RuntimeError, match=r"has changed between .*factors\['output'\] == 1.0 held then"):
            torch.autograd.grad(
                losses[0], list(maml.parameters()), retain_graph=True, create_graph=create_graph
            )
    maml.model.factors["output"] = 1.0
    torch.autograd.grad(losses[0], list(maml.parameters()), create_graph=True)


def test_a_graph_is_kept_after_one_that_was_not():
    how = {"steps": 1, "compile": {"whole": False, "backend": "aot_eager"}}
    batch, maml = draw_batch(), mg.MAML(perceptron(), F.mse_loss, inner=rules.sgd(lr=0.1), **how)
    params = list(maml.parameters())
    expected = torch.autograd.grad(maml(batch).loss, params)
    loss = maml(batch).loss
    assert_same(torch.autograd.grad(loss, params, retain_graph=True), expected)
    assert_same(torch.autograd.grad(loss, params), expected)


def test_a_buffer_that_is_written_into_before_the_backward_pass_is_refused(whole):
    _, compiled, _ = whole
    loss = compiled(draw_batch()).query_losses[0]
    compiled.model.gain.mul_(2)
    with pytest.raises(RuntimeError, match=r"that the model or the loss reads was modified in place"):
        torch.autograd.grad(loss, list(compiled.parameters()))
    compiled.model.gain.div_(2)
