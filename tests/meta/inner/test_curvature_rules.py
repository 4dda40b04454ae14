"""Rules that use curvature, as inner optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.optim import probes
from metagrad.optim.diagonal.adahessian import adahessian
from metagrad.optim.diagonal.sophia import sophia_g, sophia_h
from metagrad.optim.kronecker.kfac import kfac
from metagrad.optim.kronecker.layer_objective import LayerObjective
from metagrad.optim.newton.gauss_newton import gauss_newton
from metagrad.optim.newton.natural_gradient import natural_gradient
from metagrad.optim.newton.newton_cg import newton_cg
from metagrad.optim.transforms.chain import chain
from metagrad.optim.transforms.clip import clip_by_norm
from tests.marks import fast, slow

F64 = torch.float64
# So gentle that no element is clipped, where the derivative of Sophia jumps.
GENTLE = {"lr": 0.05, "gamma": 4.0, "eps": 4.0, "curvature_every": 2}
EACH_STEP = {"curvature_every": 1, "inverse_every": 1}
RULES = {
    "adahessian": lambda: adahessian(lr=0.05, eps=0.5),
    "sophia_h": lambda: sophia_h(**GENTLE),
    "sophia_g": lambda: sophia_g(**GENTLE),
    "newton_cg": lambda: newton_cg(lr=0.5, damping=20.0, adapt=False, progress=None),
    "newton_cg, adapted": lambda: newton_cg(lr=0.5, damping=20.0),
    "newton_cg, every second": lambda: newton_cg(lr=0.5, damping=20.0, curvature_every=2, pairs=2),
    "gauss_newton": lambda: gauss_newton(lr=0.5, damping=2.0),
    "natural_gradient": lambda: natural_gradient(lr=0.1, damping=2.0),
    "kfac": lambda: kfac(lr=0.3, damping=0.3, weight_decay=0.1, decay=0.3, **EACH_STEP),
    "kfac, sampled": lambda: kfac(lr=0.3, damping=0.3, fisher="sampled", kl_clip=None),
    "kfac in a chain": lambda: chain(
        clip_by_norm(100.0), kfac(lr=0.3, damping=0.3, kl_clip=1.0, **EACH_STEP)
    ),
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
@pytest.mark.parametrize(("outputs", "loss_fn"), [slow(1, F.mse_loss), (2, F.cross_entropy)])
@pytest.mark.parametrize("task_chunk", [None, slow(1)])
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


@pytest.mark.parametrize("name", fast(("sophia_g", "newton_cg, adapted", "kfac, sampled", "chain"), RULES))
@pytest.mark.parametrize("memory", ["step", slow("sqrt"), slow("1MiB")])
@pytest.mark.parametrize("task_chunk", [None, slow(1)])
def test_memory_changes_nothing(name, memory, task_chunk):
    torch.testing.assert_close(
        gradient(name, memory=memory, task_chunk=task_chunk), gradient(name, task_chunk=task_chunk)
    )


def test_the_first_probes_of_a_process_can_be_recomputed():
    expected = gradient("adahessian")
    probes._signs_of_bytes.cache_clear()
    torch.testing.assert_close(gradient("adahessian", memory="sqrt"), expected)


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
        return seeded(meta, batch).support_losses

    torch.testing.assert_close(found(3), found(1))


@pytest.mark.parametrize("name", ["adahessian", "kfac"])
def test_it_is_not_compiled_and_says_so(name):
    meta = maml(name, model(), compile=True)
    with pytest.warns(UserWarning, match="its rule asks for curvature"):
        seeded(meta, Batch())


def convolutional():
    """Return a model whose layers are called in stacks, within a vmap, and beside others."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.norm = nn.Conv1d(1, 2, 2), nn.Conv1d(1, 2, 1), nn.GroupNorm(1, 2)

        def forward(self, x):
            return self.norm(self.one(x).tanh_() + self.two(x).mean(2, keepdim=True)).relu_()

    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [Branches(), nn.Flatten(), nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)]
        return nn.Sequential(*layers).double()


def with_channels(batch):
    for part in (batch.support, batch.query):
        part.x = part.x.unsqueeze(2)
    return batch


@pytest.mark.parametrize("kl_clip", [None, 1e-4])
@pytest.mark.parametrize("tolerance", [None, 1e-6])
def test_kfac_of_stacked_tasks_is_that_of_each(kl_clip, tolerance):
    def found(task_chunk):
        net = convolutional()
        inner = kfac(lr=0.3, damping=0.3, kl_clip=kl_clip, **EACH_STEP)
        with pytest.warns(UserWarning, match=r"inner=kfac.*plain gradient: 0.norm \(GroupNorm\)\.$"):
            meta = mg.MAML(net, F.mse_loss, inner=inner, steps=3, task_chunk=task_chunk, tolerance=tolerance)
        out = meta(with_channels(Batch()))
        out.loss.backward()
        assert not any(module._forward_hooks for module in net.modules())
        return out.support_losses.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])

    for stacked, alone in zip(found(3), found(1), strict=True):
        torch.testing.assert_close(stacked, alone, rtol=1e-9, atol=1e-12)


def test_an_inner_loop_by_kfac_is_the_loop_by_hand():
    """Each task has factors of its own, of its support examples."""
    net, batch, rule = model(), Batch(), RULES["kfac"]()
    adapted = mg.MAML(net, F.mse_loss, inner=rule, steps=3).adapt(batch.support)
    for task in range(3):
        params = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        state = rule.init(params)
        for _ in range(3):
            objective = LayerObjective(net, F.mse_loss, batch.support.x[task], batch.support.y[task], params)
            params, state = rule.update(objective.grads, state, params, objective)
            params = {name: p.detach().requires_grad_() for name, p in params.items()}
        for name, p in params.items():
            torch.testing.assert_close(adapted.params[name][task], p, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("memory", ["full", "step"])
def test_learned_hyperparameters_of_kfac(memory):
    learned = {name: nn.Parameter(torch.tensor(v, dtype=F64)) for name, v in (("lr", 0.3), ("damping", 0.3))}
    meta = mg.MAML(model(), F.mse_loss, inner=kfac(**learned, kl_clip=None), steps=3, memory=memory)
    meta(Batch()).loss.backward()

    def loss_with(**values):
        numbers = {**{name: p.item() for name, p in learned.items()}, **values}
        with torch.no_grad():
            return mg.MAML(model(), F.mse_loss, inner=kfac(**numbers, kl_clip=None), steps=3)(
                Batch()
            ).loss.item()

    for name, p in learned.items():
        difference = (loss_with(**{name: p.item() + 1e-6}) - loss_with(**{name: p.item() - 1e-6})) / 2e-6
        assert p.grad.item() == pytest.approx(difference, rel=1e-6)


def test_kfac_beside_a_table_of_which_only_rows_are_there():
    def found(sparse):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Embedding(50, 3), nn.Flatten(), nn.Linear(6, 1)).double()
        batch = Batch()
        for part in (batch.support, batch.query):
            part.x = part.x.abs().mul(10).long()
        with pytest.warns(UserWarning, match=r"plain gradient: 0 \(Embedding\)"):
            meta = mg.MAML(net, F.mse_loss, inner=kfac(lr=0.1, damping=0.3), steps=2, sparse=sparse)
        return meta(batch).support_losses

    torch.testing.assert_close(found(["0.weight"]), found([]))


def test_kfac_refuses_layers_that_it_does_not_know_by_name():
    net = nn.Sequential(nn.Conv1d(2, 2, 1, groups=2))
    with pytest.raises(
        ValueError, match=r"MAML\(\.\.\., inner=kfac\(\.\.\.\)\): '0' is a convolution of 2 groups"
    ):
        maml("kfac", net)


@pytest.mark.parametrize("task_chunk", [None, 1])
def test_kfac_refuses_a_layer_that_is_called_twice(task_chunk):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(2, 2, dtype=F64), nn.Linear(2, 1, dtype=F64)

        def forward(self, x):
            return self.last(self.layer(self.layer(x)))

    with pytest.raises(ValueError, match=r"'layer\.weight' was called twice"):
        maml("kfac", Twice(), task_chunk=task_chunk)(Batch())


def test_kfac_refuses_a_vmap_of_the_models_own():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1, dtype=F64)

        def forward(self, x):
            return torch.vmap(self.layer)(x)

    with pytest.raises(
        ValueError, match=r"'layer\.weight' was called within a torch\.vmap of the model's own"
    ):
        maml("kfac", Mapped())(Batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner",
    [
        adahessian(lr=0.05, eps=1.0),
        sophia_h(lr=0.02, curvature_every=2),
        kfac(lr=0.1, damping=1.0, kl_clip=None),
    ],
    ids=["adahessian", "sophia_h", "kfac"],
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
