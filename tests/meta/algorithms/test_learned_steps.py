"""Meta-SGD and Meta-Curvature against a loop over tasks with the steps of the papers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import metagrad as mg
from metagrad.tasks import Batch, Examples
from tests.marks import covering
from tests.meta.textbook import assert_learns_as, net, textbook

rules = mg.optim.rules


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()


def perturbed(maml):
    """Perturb learned rates and matrices, so that all rates differ and no matrix is symmetric."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in maml.named_parameters():
            if name.startswith("inner"):
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.05)
    return maml


def rate_step(maml):
    """Return the step ``alpha * g``, with rates for entries, tensors or steps."""

    def step(t, name, g):
        if hasattr(maml, "inner_lr"):
            return maml.inner_lr[t] * g
        return getattr(maml, f"inner_lr_{name.replace('.', '_')}") * g

    return step


def curvature_step(maml, lr=0.1, psd=False):
    """Return the step ``alpha * G x_1 M_o x_2 M_i x_3 M_f``, as sums over indices."""

    def step(t, name, g):
        stem = f"inner_transforms_0_matrices_{name.replace('.', '_')}_"
        learned = [m for key, m in maml.named_parameters() if key.startswith(stem)]
        if psd:
            learned = [m**2 if m.ndim == 1 else m.T @ m for m in learned]
        if g.ndim == 1:
            return lr * learned[0] * g
        if g.ndim == 2:
            return lr * torch.einsum("oi,pi,qo->qp", g, learned[1], learned[0])
        return lr * torch.einsum("oif,gf,pi,qo->qpg", g.flatten(2), *reversed(learned)).reshape(g.shape)

    return step


def meta_sgd(model, loss_fn, **options):
    return perturbed(mg.MetaSGD(model, loss_fn, lr=0.1, **options))


def meta_curvature(model, loss_fn, **options):
    return perturbed(mg.MetaCurvature(model, loss_fn, inner=rules.sgd(lr=0.1), **options))


ALGORITHMS = {
    "entry": (meta_sgd, {}, rate_step),
    "tensor": (meta_sgd, {"per": "tensor"}, rate_step),
    "step": (meta_sgd, {"per": "step"}, rate_step),
    "curvature": (meta_curvature, {}, curvature_step),
    "curvature, psd": (meta_curvature, {"psd": True}, lambda maml: curvature_step(maml, psd=True)),
}
WAYS = [
    {},
    {"task_chunk": 1},
    {"memory": "step"},
    {"memory": "sqrt", "task_chunk": 2},
    {"memory": "64KiB"},
    {"order": 1},
]


def assert_is_the_textbook(maml, loss_fn, batch, step, steps=2, order=2, adapt=""):
    names = [name for name, _ in maml.model.named_parameters() if name.startswith(adapt)]
    losses = textbook(maml.model, loss_fn, batch, lr=step, steps=steps, order=order, names=names)
    found = assert_learns_as(maml(batch), losses, maml.parameters())
    assert all(g.abs().max() > 0 for g in found)


@pytest.mark.parametrize(
    ("name", "options"),
    covering(ALGORITHMS, WAYS, fast=lambda name, options: not options or name == "curvature"),
    ids=str,
)
def test_meta_gradients_are_those_of_the_textbook(regression, name, options):
    make, more, step = ALGORITHMS[name]
    maml = make(net(), F.mse_loss, steps=2, **more, **options)
    assert_is_the_textbook(maml, F.mse_loss, regression, step(maml), order=options.get("order", 2))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_does_not_adapt_has_nothing_of_its_own(regression, name):
    make, more, step = ALGORITHMS[name]
    maml = make(net(), F.mse_loss, steps=2, adapt="2.*", **more)
    assert not [key for key, _ in maml.named_parameters() if "inner" in key and "0_weight" in key]
    assert_is_the_textbook(maml, F.mse_loss, regression, step(maml), adapt="2")


@pytest.mark.parametrize("task_chunk", [None, 1])
@pytest.mark.parametrize("name", ["entry", "curvature"])
def test_convolutions(name, task_chunk):
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(2, 2, 3, 1, 4, 4, generator=generator).double(), torch.arange(3).repeat(2, 1)
    make, more, step = ALGORITHMS[name]
    maml = make(convolutional(), F.cross_entropy, steps=2, task_chunk=task_chunk, **more)
    batch = Batch(*(Examples(x, labels) for x in images))
    assert_is_the_textbook(maml, F.cross_entropy, batch, step(maml))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_copies_state_and_functional_calls(regression, name):
    make, more, _ = ALGORITHMS[name]
    maml = make(net(), F.mse_loss, steps=2, **more)
    expected = maml(regression).loss
    fresh = make(net(), F.mse_loss, steps=2, **more)
    fresh.load_state_dict({key: p + 1 for key, p in maml.state_dict().items()})
    assert not torch.allclose(fresh(regression).loss, expected)
    fresh.load_state_dict(maml.state_dict())
    for other in (copy.deepcopy(maml), pickle.loads(pickle.dumps(maml)), fresh):
        torch.testing.assert_close(other(regression).loss, expected)
    values = {key: p.detach().clone().requires_grad_() for key, p in maml.named_parameters()}
    loss = functional_call(fresh, values, (regression,)).loss
    grads = torch.autograd.grad(loss, list(values.values()))
    torch.testing.assert_close(grads, torch.autograd.grad(expected, list(maml.parameters())))


def test_at_the_start_they_are_maml(regression):
    expected = mg.MAML(net(), F.mse_loss, inner=rules.sgd(lr=0.1), steps=2)(regression).loss
    learned = [
        mg.MetaSGD(net(), F.mse_loss, lr=0.1, steps=2),
        mg.MetaCurvature(net(), F.mse_loss, inner=rules.sgd(lr=0.1), steps=2),
    ]
    for maml in learned:
        torch.testing.assert_close(maml(regression).loss, expected)


def test_the_inner_rule_of_meta_curvature_may_be_any_and_learn_too(regression):
    lr = nn.Parameter(torch.tensor(0.1).double())
    inner = rules.chain(rules.clip_by_norm(0.5), rules.adam(lr, eps=1e-2))
    maml = mg.MetaCurvature(net(), F.mse_loss, inner=inner, steps=2, nonfinite="skip")
    plain = mg.MAML(net(), F.mse_loss, inner=inner, steps=2)
    torch.testing.assert_close(maml(regression).loss, plain(regression).loss)
    maml(regression).loss.backward()
    assert [name for name, p in maml.named_parameters() if p is lr] == ["inner_rule_rule_lr"]
    assert all(p.grad.abs().max() > 0 for p in maml.parameters())


class Tagger(nn.Module):
    """A model that sums the table rows of a bag."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 3), nn.Linear(3, 1)

    def forward(self, ids):
        return self.head(self.table(ids).sum(1).tanh())


def bags():
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: Examples(  # noqa: E731
        torch.randint(50, (3, n, 2), generator=generator), torch.randn(3, n, 1, generator=generator).double()
    )
    return Batch(draw(4), draw(5))


@pytest.mark.parametrize("make", [
    lambda **options: meta_sgd(Tagger().double(), F.mse_loss, steps=2, per="tensor", **options),
    lambda **options: meta_curvature(Tagger().double(), F.mse_loss, steps=2, **options),
])  # fmt: skip
def test_tables(make):
    """The matrix for the columns of a table acts on all rows."""
    torch.manual_seed(0)
    sparse = make(sparse=["table.weight"])
    torch.manual_seed(0)
    dense = make()
    rows = "inner_transforms_0_matrices_table_weight_0"
    with torch.no_grad():
        for name, p in dense.named_parameters():
            p.copy_(torch.eye(50) if name == rows else sparse.get_parameter(name))
    ours, theirs = sparse(bags()).loss, dense(bags()).loss
    torch.testing.assert_close(ours, theirs)
    names = [name for name, _ in sparse.named_parameters() if name != "model.table.weight"]
    got, expected = (
        torch.autograd.grad(loss, [maml.get_parameter(name) for name in names])
        for loss, maml in ((ours, sparse), (theirs, dense))
    )
    torch.testing.assert_close(got, expected)
