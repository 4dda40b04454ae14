import copy
import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import covering, slow
from tests.meta.textbook import gradients, learner, textbook

sgd = mg.optim.rules.sgd


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()


class Custom(nn.Module):
    """A model that needs vmap: tied weights, a parameter of its own, a residual connection."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.enter = nn.Linear(2, 8)
        self.mix = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))
        self.leave = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))
        self.double()

    def forward(self, x):
        h = torch.tanh(self.enter(x)) * self.gain
        return self.leave(self.mix(self.mix(h)) + h)


def tied():
    torch.manual_seed(2)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(nn.Linear(2, 3), first, nn.Tanh(), second).double()


def frozen():
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def conv(norm):
    torch.manual_seed(3)
    return mg.models.Conv4(3, hidden=4, image_size=16, norm=norm).double()


def meta_gradient(loss, model, **options):
    return gradients(loss, [p for p in model.parameters() if p.requires_grad], **options)


def derivatives(loss, model):
    """Return the gradient, and the gradient of its squares: third order in the inner loss.

    Third derivatives of torch's layer norm, which ``Custom`` has, are incorrect.
    """
    first = meta_gradient(loss, model, create_graph=True)
    return [*first, *meta_gradient(sum(g.square().sum() for g in first), model)]


def assert_same(got, expected, rtol=1e-10):
    scale = max(float(e.detach().abs().max()) for e in expected)
    for a, b in zip(got, expected, strict=True):
        # A bias before BatchNorm has the exact gradient 0, so the tolerance uses the scale of the whole gradient.
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * scale)


REGRESSION = {"MLP": mlp, "custom forward": Custom, "tied weights": tied, "frozen": frozen}


def is_fast(model, steps, memory, task_chunk):
    """Return whether a case is fast: one model with each policy, and each model with ``memory="full"``."""
    return steps == 5 and task_chunk != 3 and (memory == "full" or model == "MLP")


@pytest.mark.parametrize(
    ("model", "steps", "memory", "task_chunk"),
    covering(REGRESSION, [0, 1, 5, 10], ["full", "step", "sqrt", "160KiB"], [None, 1, 3], fast=is_fast),
)
def test_meta_gradient_equals_the_textbook_loop(regression, model, steps, memory, task_chunk):
    model = REGRESSION[model]()
    maml = learner(mg.MAML, model, steps=steps, memory=memory, task_chunk=task_chunk)
    expected = textbook(model, F.mse_loss, regression, lr=0.1, steps=steps)
    out = maml(regression)
    torch.testing.assert_close(out.query_losses, expected, rtol=1e-10, atol=1e-12)
    found, expected = (
        meta_gradient(loss, model) if isinstance(model, Custom) else derivatives(loss, model)
        for loss in (out.loss, expected.mean())
    )
    assert_same(found, expected, rtol=1e-9)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(
    ("steps", "memory", "task_chunk"), [(1, "full", 2), (1, "step", None), slow(5, "step", 2)]
)
def test_conv4_equals_the_textbook_loop(images, norm, steps, memory, task_chunk):
    model = conv(norm)
    maml = mg.MAML(
        model, F.cross_entropy, inner=sgd(lr=0.05), steps=steps, memory=memory, task_chunk=task_chunk
    )
    expected = textbook(model, F.cross_entropy, images, lr=0.05, steps=steps)
    assert_same(meta_gradient(maml(images).loss, model), meta_gradient(expected.mean(), model))


def test_support_losses_at_first_order_have_a_gradient_where_steps_are_computed_again(regression):
    """If graphs are freed, the error names the argument to change."""
    model = mlp()

    def first_order(memory):
        out = learner(mg.MAML, model, steps=3, order=1, memory=memory)(regression)
        return meta_gradient(out.loss + out.support_losses[:, 1:].mean(), model)

    with pytest.raises(RuntimeError, match=r'out.support_losses has no gradient. Pass memory="step"'):
        first_order("full")
    assert_same(first_order("step"), first_order("sqrt"))


@pytest.mark.parametrize("memory", ["full", "step"])
@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_the_hessian_through_a_norm_is_right(regression, norm, memory):
    """Third derivatives of torch are incorrect, and recomputed or vectorized ones were silently incorrect."""
    model = nn.Sequential(nn.Linear(2, 4), norm, nn.Tanh(), nn.Linear(4, 3)).double()
    params = dict(model.named_parameters())
    vector = torch.randn(sum(p.numel() for p in params.values())).double()

    def product(task_chunk):
        maml = learner(mg.MAML, model, memory=memory, task_chunk=task_chunk)

        def loss(p):
            return torch.func.functional_call(
                maml, {f"model.{k}": v for k, v in p.items()}, (regression,)
            ).loss

        with mg.hessian(loss, params) as H:
            return H @ vector

    with mg.models.composite_norms():
        expected = product(None)
    torch.testing.assert_close(product(1), expected)
    torch.testing.assert_close(product(None), expected)


def test_output_shapes_and_the_first_losses(regression):
    model = mlp()
    maml = learner(mg.MAML, model, steps=5)
    out = maml(regression)
    assert repr(maml.adapt(regression.support)).startswith(
        "AdaptedModel(4 tasks, 5 steps, params=['0.weight', "
    )
    assert out.loss.shape == ()
    assert out.support_losses.shape == (4, 5)
    assert out.query_losses.shape == (4,)
    assert out.query_outputs.shape == (4, 5, 3)
    plain = torch.stack([F.mse_loss(model(x), y) for x, y in zip(*regression.support, strict=True)])
    torch.testing.assert_close(out.support_losses[:, 0], plain)
    torch.testing.assert_close(out.loss, out.query_losses.mean())
    assert (out.support_losses[:, -1] < out.support_losses[:, 0]).all()
    assert out.support_losses.requires_grad
    assert out.query_outputs.requires_grad
    shapes = r"query_losses=\[4\], query_outputs=\[4, 5, 3\], .*skipped=\[4\]"
    assert re.fullmatch(rf"MetaOutput\(loss=[\d.]+, {shapes}\)", repr(out))


@pytest.mark.parametrize(
    ("memory", "task_chunk"), [("full", None), ("full", 1), ("step", None), ("sqrt", 1), ("160KiB", None)]
)
def test_adapt_gives_the_model_that_forward_evaluates_also_without_grad_mode(regression, task_chunk, memory):
    maml = learner(mg.MAML, mlp(), steps=3, task_chunk=task_chunk, memory=memory)
    expected, differentiable = maml(regression), maml.adapt(regression.support)
    assert differentiable(regression.query.x).requires_grad
    with torch.no_grad():
        out, fast = maml(regression), maml.adapt(regression.support)
    assert not any(
        t.requires_grad for t in (out.loss, out.support_losses, out.query_losses, out.query_outputs)
    )
    assert all(p.grad_fn is None for p in fast.params.values())
    assert fast.params["0.weight"].shape == (4, 8, 2)
    torch.testing.assert_close(out.query_outputs, expected.query_outputs)
    for adapted in (fast, differentiable):
        torch.testing.assert_close(adapted(regression.query.x), expected.query_outputs)
        torch.testing.assert_close(adapted.support_losses, expected.support_losses)
        assert torch.equal(adapted.steps, expected.steps)


def test_a_parameter_the_loss_does_not_use_stays_as_it_is(regression):
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    fast = learner(mg.MAML, model).adapt(regression.support)
    assert torch.equal(fast.params["unused"].detach(), torch.ones(4, 2, dtype=torch.float64))


def test_dropout_masks_differ_from_task_to_task_and_repeat_with_the_seed():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 2)).double()
    ones = torch.ones(3, 4, 6, dtype=torch.float64)
    batch = Batch(
        Examples(ones, torch.zeros(3, 4, 2).double()), Examples(ones, torch.zeros(3, 4, 2).double())
    )
    maml = learner(mg.MAML, model, memory="step")
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        out = maml(batch)
        results.append((out.query_outputs, *meta_gradient(out.loss, model)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0][0], results[0][0][1])


def test_running_statistics_are_updated_once_with_recomputation(regression):
    model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    models = [model, copy.deepcopy(model)]
    for model, memory in zip(models, ["full", "step"], strict=True):
        maml = learner(mg.MAML, model, memory=memory, task_chunk=1)
        maml(regression).loss.backward()
    torch.testing.assert_close(models[0][1].running_mean, models[1][1].running_mean)
    assert models[1][1].num_batches_tracked == 4 * 3


def test_an_error_of_the_model_is_not_taken_for_one_of_vmap(regression):
    model = nn.Sequential(nn.Linear(7, 3)).double()
    maml = learner(mg.MAML, model, steps=1)
    with pytest.raises(RuntimeError, match="shapes"):  # and no warning
        maml(regression)


def test_phases_are_reported_to_an_open_tracker(regression):
    maml = learner(mg.MAML, mlp(), steps=3)
    with mg.MemoryTracker(device="cpu") as mem, mem.outer(0):
        maml(regression).loss.backward()
    assert [r.path[-1] for r in mem.records()] == [
        ("outer", 0),
        ("inner", 0),
        ("inner", 1),
        ("inner", 2),
        ("query", None),
    ]


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_a_module_that_occurs_twice_in_a_model(regression, task_chunk):
    """``torch.func.functional_call`` does not restore such a model. It does the same one with tied weights."""
    written_out = tied()
    written_out[3].bias = written_out[1].bias
    model = nn.Sequential(*written_out[:3], written_out[1])
    maml = learner(mg.MAML, model, steps=3, task_chunk=task_chunk)
    losses = textbook(written_out, F.mse_loss, regression, lr=0.1, steps=3)
    assert_same(meta_gradient(maml(regression).loss, model), meta_gradient(losses.mean(), written_out))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_maml_is_an_algorithm_of_few_arguments_and_a_model_is_none():
    assert isinstance(learner(mg.MAML, mlp()), mg.meta.Algorithm)
    assert not isinstance(mlp(), mg.meta.Algorithm)
    assert len(inspect.signature(mg.MAML).parameters) <= 10
