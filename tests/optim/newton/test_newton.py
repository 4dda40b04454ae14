"""Optimizers that evaluate the loss again: the calls of a closure and their side effects."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metagrad.optim import LBFGS, GaussNewton, NewtonCG
from tests.optim.second_order.problems import classic_start, rosenbrock
from tests.optim.torch_optim.cases import (
    assert_equal,
    batch,
    classification,
    closure_of,
    network,
    run,
    snapshot,
)

F64 = torch.float64
EVERY = [NewtonCG, GaussNewton, LBFGS]
every = pytest.mark.parametrize("make", EVERY)
SHARED_SYSTEM = [NewtonCG, GaussNewton]
FIXED = {
    NewtonCG: {"adapt": False, "damping": 0.5},
    GaussNewton: {"adapt": False, "damping": 0.5},
    LBFGS: {"line_search_fn": None, "lr": 0.3},
}

EXACT = {LBFGS: {"tolerance_grad": 0.0, "tolerance_change": 0.0}}


@every
def test_looking_at_the_loss_again_leaves_no_trace(make):
    """Neither in .grad, nor in random numbers, nor in the memory of parameters."""
    model = network(F64)
    opt = make(model.parameters(), **({"damping": 0.5} if make is GaussNewton else {}))
    loss_of, calls = classification(model, F64), []

    def closure():
        model.zero_grad()
        dropped = torch.rand(())  # what a dropout would draw
        loss = loss_of() + 0 * dropped
        loss.backward()
        calls.append((float(dropped), loss.detach()))
        return loss

    torch.manual_seed(3)
    places = [p.data_ptr() for p in model.parameters()]
    expected = torch.autograd.grad(loss_of(), list(model.parameters()))
    returned = opt.step(closure)
    assert len(calls) > 1
    assert len({dropped for dropped, _ in calls}) == 1
    assert returned == calls[0][1]
    assert calls[-1][1] < calls[0][1]
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=0)
    after = torch.rand(())
    torch.manual_seed(3)
    torch.rand(())
    assert torch.equal(after, torch.rand(()))
    assert places == [p.data_ptr() for p in model.parameters()]


class Averaging(nn.Module):
    """A layer that replaces a buffer at every call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=F64)
        self.layer = nn.Linear(4, 3, dtype=F64)
        self.register_buffer("mean", torch.zeros(3, dtype=F64))

    def forward(self, x):
        z = self.layer(self.norm(x))
        self.mean = 0.5 * self.mean + 0.5 * z.detach().mean(0)
        return z


@pytest.mark.parametrize(("make", "has_part"), [*((make, False) for make in EVERY), (NewtonCG, True)])
def test_running_statistics_move_once_a_step(make, has_part):
    """As they do by the first call of the closure, where the step begins."""
    torch.manual_seed(0)
    model, calls = Averaging(), []
    x, y = torch.randn(12, 4, dtype=F64) * 3 + 1, torch.randint(3, (12,))
    opt = make(model.parameters())

    def closure(num_examples=12):
        opt.zero_grad()
        calls.append(num_examples)
        loss = F.cross_entropy(model(x[:num_examples]), y[:num_examples])
        loss.backward()
        return loss

    for count in range(1, 4):
        twin = copy.deepcopy(model)
        twin(x)
        places = [buffer.data_ptr() for buffer in model.norm.buffers()]
        opt.step(closure, **({"curvature": functools.partial(closure, 6)} if has_part else {}))
        assert int(model.norm.num_batches_tracked) == count
        assert places == [buffer.data_ptr() for buffer in model.norm.buffers()]
        for (key, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=key)  # norms are written out
    assert len(calls) > 3


# Groups


@every
def test_groups_that_agree_are_one_group(make):
    results = []
    for is_split in (False, True):
        model = network(F64)
        named = list(model.named_parameters())
        opt = make([{"params": [one]} for one in named] if is_split else named)
        run(opt, classification(model, F64), 2)
        results.append((snapshot(model), opt.stats))
    assert_equal(results[0][0], results[1][0])
    assert str(results[0][1]) == str(results[1][1])


@every
def test_a_group_of_step_size_zero_stays_and_the_others_step_as_alone(make):
    a, b = (torch.tensor([2.0, -1.0], dtype=F64, requires_grad=True) for _ in range(2))
    goal, alone = (
        torch.tensor([1.0, 3.0], dtype=F64),
        torch.tensor([2.0, -1.0], dtype=F64, requires_grad=True),
    )

    def loss_of(one, other):
        return lambda: F.mse_loss(torch.tanh(one + other) * 2 + other, goal)

    opt = make([{"params": [a], "lr": 0.0}, {"params": [b]}], **FIXED[make])
    run(opt, loss_of(a, b), 3)
    assert a.tolist() == [2.0, -1.0]
    run(make([alone], **FIXED[make]), loss_of(a.detach(), alone), 3)
    torch.testing.assert_close(b, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", SHARED_SYSTEM)
def test_groups_have_their_own_lr_damping_and_weight_decay(make):
    """The step is s = -L (A + D + W)^-1 (g + W w) with diagonal L, D, W. The ratio includes the penalty."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=generator, dtype=F64)
    w = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    a, b = w[:1].clone().requires_grad_(), w[1:].clone().requires_grad_()
    groups = [
        {"params": [a], "lr": 0.5, "damping": 2.0, "weight_decay": 0.3},
        {"params": [b], "lr": 0.9, "damping": 0.1, "weight_decay": 0.0},
    ]
    opt = make(groups, rtol=1e-14, progress=None)
    run(opt, lambda: F.mse_loss(x @ torch.cat([a, b]), torch.ones(6, dtype=F64)), 1)
    L, D, W = (
        torch.diag(torch.tensor([first, second, second], dtype=F64))
        for first, second in ((0.5, 0.9), (2.0, 0.1), (0.3, 0.0))
    )
    A, g = 2 * x.T @ x / 6, 2 * x.T @ (x @ w - 1) / 6
    s = -L @ torch.linalg.solve(A + D + W, g + W @ w)
    assert float((g + W @ w) @ s) < 0
    torch.testing.assert_close(torch.cat([a, b]).detach(), w + s, rtol=1e-9, atol=0)
    assert opt.stats["ratio"] == pytest.approx(1, abs=1e-9)
    assert opt.stats["length"] == 0.9


def test_step_sizes_that_turn_the_step_uphill_give_way_to_the_least():
    w = torch.tensor([0.1, 0.9], dtype=F64)
    H = torch.tensor([[1.0, 3.0], [3.0, 10.0]], dtype=F64)
    b = torch.tensor([0.3, 0.0], dtype=F64)
    g = H @ w - b
    d = -torch.linalg.solve(H, g)
    lr = [1.0, 0.1] if float(g[0] * d[0]) > 0 else [0.1, 1.0]
    assert float(g @ (torch.tensor(lr, dtype=F64) * d)) > 0
    x, y = (v.clone().reshape(1).requires_grad_() for v in w)

    def loss():
        both = torch.cat([x, y])
        return both @ H @ both / 2 - b @ both

    opt = NewtonCG([{"params": [x], "lr": lr[0]}, {"params": [y], "lr": lr[1]}], rtol=1e-14)
    run(opt, loss, 1)
    torch.testing.assert_close(torch.cat([x, y]).detach(), w + 0.1 * d, rtol=1e-9, atol=0)


@every
def test_weight_decay_is_part_of_the_objective(make):
    """Steps converge to the minimum of the loss with its penalty."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator, dtype=F64)
    w = torch.zeros(3, dtype=F64, requires_grad=True)
    opt = make([w], weight_decay=0.5, **EXACT.get(make, {}))
    run(opt, lambda: F.mse_loss(x @ w, torch.ones(12, dtype=F64)), 30)
    A, b = 2 * x.T @ x / 12, 2 * x.sum(0) / 12
    expected = torch.linalg.solve(A + 0.5 * torch.eye(3, dtype=F64), b)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (
            NewtonCG,
            {"max_steps": 3},
            r"NewtonCG\(params\): all groups make one step, whose max_steps must be one, got",
        ),
        (GaussNewton, {"adapt": False}, "Only lr, weight_decay, damping may differ"),
        (LBFGS, {"maximize": True}, "Only lr, weight_decay may differ"),
    ],
)
def test_what_there_is_one_of_must_agree_between_groups(make, options, match):
    a, b = (torch.ones(2, dtype=F64, requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match=match):
        make([{"params": [a]}, {"params": [b], **options}])
    opt = make([{"params": [a]}, {"params": [b]}])
    opt.param_groups[1].update(options)
    with pytest.raises(ValueError, match=match):
        run(opt, lambda: F.mse_loss(a, b), 1)


def test_damping_of_a_scheduler_scales_what_was_adapted():
    w = classic_start(2).requires_grad_()
    opt = NewtonCG([w], damping=1.0)
    run(opt, lambda: rosenbrock(w), 3)
    factor = opt.stats["damping"]
    opt.param_groups[0]["damping"] = 10.0
    assert opt.stats["damping"] == pytest.approx(10 * factor)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    run(opt, lambda: rosenbrock(w), 1)
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("make", [NewtonCG, GaussNewton])
def test_curvature_of_a_part_of_the_data(make):
    """Two closures: gradient and loss of all data, and the matrix of two of them."""
    x = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    w = torch.tensor([1.0], dtype=F64, requires_grad=True)
    opt = make([w], adapt=False, damping=0.0)

    def all_data():
        opt.zero_grad()
        loss = F.mse_loss(w * x, torch.zeros_like(x))
        loss.backward()
        return loss

    def part():
        opt.zero_grad()
        F.mse_loss(w * x[:2], torch.zeros(2, dtype=F64)).backward()

    opt.step(all_data, curvature=part)
    assert w.grad.item() == pytest.approx(28 / 3)
    assert w.item() == pytest.approx(1 - (28 / 3) / 5, rel=1e-6)
    adapted = make([w])
    adapted.step(closure_of(adapted, all_data_of(w, x)), curvature=closure_of(adapted, all_data_of(w, x[1:])))
    assert adapted.stats["products"] >= 1
    with pytest.raises(ValueError, match=r"step\(curvature=...\): there is no closure"):
        opt.step(curvature=part)


def all_data_of(w, x):
    return lambda: F.mse_loss(w * x, torch.zeros_like(x))


def test_a_closure_that_stops_calling_backward_is_refused():
    w, calls = torch.ones(2, requires_grad=True), []
    opt = NewtonCG([w])

    def closure():
        loss = w.pow(4).sum()
        if not calls:
            loss.backward()
        calls.append(loss)
        return loss

    with pytest.raises(RuntimeError, match=r"opt.step\(closure\): .*has called loss.backward\(\) at its"):
        opt.step(closure)
    with pytest.raises(TypeError, match=r"NewtonCG.step\(closure\): .* not what it returns, got Tensor"):
        opt.step(w.sum())
    assert w.tolist() == [1.0, 1.0]


# Likelihoods written by hand


def test_a_known_loss_written_by_hand_gives_the_same_steps():
    """The loss is a weighted cross-entropy, written by logsumexp, and a penalty."""
    results, (x, y) = [], batch(F64)
    for by_hand in (False, True):
        model = network(F64)
        opt = GaussNewton(model.parameters(), damping=0.5)

        def loss_of(model=model, opt=opt, by_hand=by_hand):
            def written(z):
                return (z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]).mean()

            z = model(x)
            value = opt.output_loss(written, z) if by_hand else F.cross_entropy(z, y)
            return 2 * value + 0.01 * sum(p.pow(2).sum() for p in model.parameters())

        run(opt, loss_of, 4)
        results.append((snapshot(model), opt.stats["products"]))
    assert abs(results[0][1] - results[1][1]) <= 1  # a residual may lie at its tolerance
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def test_a_linear_loss_written_by_hand_has_no_curvature():
    w = torch.ones(2, dtype=F64, requires_grad=True)
    opt = GaussNewton([w], **FIXED[GaussNewton])
    run(opt, lambda: opt.output_loss(lambda z: 0.1 * z.sum(), w), 1)
    torch.testing.assert_close(w.detach(), torch.full((2,), 0.8, dtype=F64))


def test_groups_of_half_precision_and_float32_step_together():
    params = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.bfloat16, torch.float32)]
    opt = NewtonCG([{"params": [p]} for p in params])
    run(opt, lambda: sum(((p - 2) ** 2).sum().float() for p in params), 2)
    assert all(torch.allclose(p.float(), torch.tensor(2.0), atol=1e-2) for p in params)
