"""Rules that use curvature, as inner optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim.rules.adahessian import adahessian
from metagrad.optim.rules.chain import chain
from metagrad.optim.rules.clip import clip_by_norm
from metagrad.optim.rules.gauss_newton import gauss_newton
from metagrad.optim.rules.natural_gradient import natural_gradient
from metagrad.optim.rules.newton_cg import newton_cg
from metagrad.optim.rules.sophia import sophia_g, sophia_h

F64 = torch.float64
# So gentle that no element is clipped, where the derivative of Sophia jumps.
GENTLE = {"lr": 0.05, "gamma": 4.0, "eps": 4.0, "curvature_every": 2}
RULES = {
    "adahessian": lambda: adahessian(lr=0.05, eps=0.5),
    "sophia_h": lambda: sophia_h(**GENTLE),
    "sophia_g": lambda: sophia_g(**GENTLE),
    "newton_cg": lambda: newton_cg(lr=0.5, damping=20.0, adapt=False, progress=None),
    "newton_cg, adapted": lambda: newton_cg(lr=0.5, damping=20.0),
    "gauss_newton": lambda: gauss_newton(lr=0.5, damping=2.0),
    "natural_gradient": lambda: natural_gradient(lr=0.1, damping=2.0),
    "chain": lambda: chain(clip_by_norm(100.0), adahessian(lr=0.05, eps=0.5)),
}
every_rule = pytest.mark.parametrize("name", RULES)


class Batch:
    def __init__(self, classes=0):
        generator = torch.Generator().manual_seed(0)

        def part():
            x = torch.randn(3, 4, 2, generator=generator, dtype=F64)
            y = x.prod(2, keepdim=True) if not classes else (x.sum(2) > 0).long()
            return type("Examples", (), {"x": x, "y": y})

        self.support, self.query = part(), part()


def model(outputs=1):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def maml(name, net, loss_fn=F.mse_loss, **options):
    return mg.MAML(net, loss_fn, inner=RULES[name](), steps=3, **options)


def seeded(meta, batch):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return meta(batch)


def gradient(name, outputs=1, loss_fn=F.mse_loss, **options):
    net = model(outputs)
    out = seeded(maml(name, net, loss_fn, **options), Batch(outputs - 1))
    out.loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@every_rule
@pytest.mark.parametrize(("outputs", "loss_fn"), [(1, F.mse_loss), (2, F.cross_entropy)])
@pytest.mark.parametrize("task_chunk", [None, 1])
def test_meta_gradients_equal_finite_differences(name, outputs, loss_fn, task_chunk):
    found = gradient(name, outputs, loss_fn, task_chunk=task_chunk)
    net, batch = model(outputs), Batch(outputs - 1)
    meta = maml(name, net, loss_fn, task_chunk=task_chunk)
    direction = torch.randn(len(found), generator=torch.Generator().manual_seed(1), dtype=F64)
    start = nn.utils.parameters_to_vector(net.parameters()).detach()

    def loss_at(step):
        nn.utils.vector_to_parameters(start + step * direction, net.parameters())
        with torch.no_grad():
            return seeded(meta, batch).loss.item()

    # Drawn labels jump where a probability passes a random number; not within so small a step.
    difference = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    assert (found @ direction).item() == pytest.approx(difference, rel=1e-6)


@every_rule
@pytest.mark.parametrize("memory", ["step", "sqrt", "1MiB"])
@pytest.mark.parametrize("task_chunk", [None, 1])
def test_memory_changes_nothing(name, memory, task_chunk):
    torch.testing.assert_close(
        gradient(name, memory=memory, task_chunk=task_chunk), gradient(name, task_chunk=task_chunk)
    )


@pytest.mark.parametrize("name", ["adahessian", "sophia_h"])
def test_block_by_block(name):
    torch.testing.assert_close(gradient(name, memory="block"), gradient(name, task_chunk=1))


def test_block_by_block_knows_no_predictions():
    with pytest.raises(ValueError, match="needs a loss of known form"):
        gradient("sophia_g", memory="block")


@every_rule
def test_first_order_takes_curvature_as_a_constant(name):
    net = model()
    out = seeded(maml(name, net, order=1), Batch())
    out.loss.backward()
    second = gradient(name)
    first = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert first.isfinite().all()
    assert not torch.allclose(first, second)


@every_rule
def test_truncated_and_without_gradients(name):
    net = model()
    losses = [
        seeded(maml(name, net, truncate=1), Batch()).loss.item(),
        seeded(maml(name, net), Batch()).loss.item(),
    ]
    with torch.no_grad():
        losses.append(seeded(maml(name, net), Batch()).loss.item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_learned_hyperparameters():
    lr = nn.Parameter(torch.tensor(0.05, dtype=F64))
    meta = mg.MAML(model(), F.mse_loss, inner=adahessian(lr=lr, eps=0.5), steps=2)
    seeded(meta, Batch()).loss.backward()
    assert lr.grad.isfinite()
    assert lr.grad != 0


def test_kernels_of_stacked_tasks_are_averaged_within_their_task():
    def found(task_chunk):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(2, 1)).double()
        batch = Batch()
        for part in (batch.support, batch.query):
            part.x = part.x.unsqueeze(2)
        # Without randomness in the probes' effect: a step of so small a curvature's power that signs do not matter.
        meta = mg.MAML(
            net, F.mse_loss, inner=adahessian(lr=0.05, hessian_power=0.0), steps=2, task_chunk=task_chunk
        )
        return seeded(meta, batch).losses

    torch.testing.assert_close(found(3), found(1))


def test_it_is_not_compiled_and_says_so():
    meta = maml("adahessian", model(), compile=True)
    with pytest.warns(UserWarning, match="its rule asks for curvature"):
        seeded(meta, Batch())


@pytest.mark.parametrize(
    "inner",
    [adahessian(lr=0.05, eps=1.0), sophia_h(lr=0.02, curvature_every=2)],
    ids=["adahessian", "sophia_h"],
)
def test_they_train_on_sinusoids(inner):
    task = mg.tasks.Sinusoid(shots=10, queries=10)
    held_out = task.sample(64, generator=torch.Generator().manual_seed(1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        meta = mg.MAML(mg.models.MLP([1, 20, 20, 1]), F.mse_loss, inner=inner, steps=2)
        outer = torch.optim.Adam(meta.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(0)
        before = meta(held_out).loss.item()
        for _ in range(120):
            outer.zero_grad()
            meta(task.sample(8, generator=generator)).loss.backward()
            outer.step()
        assert meta(held_out).loss.item() < 0.9 * before
