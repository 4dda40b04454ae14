"""Parameters together, large ones in pieces: the numbers are those of each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from metagrad.optim import Lion, SparseAdam
from metagrad.optim.torch_optim import move
from tests.optim.torch_optim.cases import assert_near, having, optimizer, run, snapshot


def model(dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv1d(2, 3, 3, dtype=dtype),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(9, 4, dtype=dtype),
            nn.Tanh(),
            nn.Linear(4, 2, dtype=dtype),
        )


def trained(case, **options):
    net = model()
    x = torch.randn(5, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    run(optimizer(case, net, **options), lambda: nn.functional.mse_loss(net(x), x[:, :, 0]), 6)
    return snapshot(net)


@having("elementwise")
def test_together_is_each_by_itself(case):
    alone = trained(case, foreach=False)
    for foreach in (True, None):
        assert_near(trained(case, foreach=foreach), alone, rtol=1e-12, atol=1e-14)


@having("elementwise")
def test_in_pieces_is_whole(case, monkeypatch):
    whole = trained(case, foreach=False)
    monkeypatch.setattr(move, "_PIECE", 7)
    assert move.is_large(model()[0].weight)
    assert_near(trained(case), whole, rtol=1e-12, atol=1e-14)


def vector():
    return torch.ones(3, dtype=torch.float64, requires_grad=True)


def test_pieces_of_a_state_do_not_share_memory(monkeypatch):
    """A rule may begin with one tensor of zeros in two slots."""
    monkeypatch.setattr(move, "_PIECE", 2)
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    opt = SparseAdam([w], lr=0.1)
    w.square().sum().backward()
    opt.step()
    state = opt.state[w]
    torch.testing.assert_close(state["mean"], 0.1 * w.grad)
    torch.testing.assert_close(state["square"], 0.001 * w.grad**2)


def bowl(w):
    return ((w - 1) * torch.tensor([1.0, 5.0])).square().sum()


def test_parameters_of_different_age_and_dtype_are_not_mixed():
    a, b = (torch.ones(1, 2, requires_grad=True) for _ in range(2))
    c = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    opt = Lion([a, b, c], lr=0.1, foreach=True)
    run(opt, lambda: bowl(a) * 2, 2)
    run(opt, lambda: bowl(a + 2) + bowl(b + 1) + bowl(c + 1), 1)
    alone = torch.ones(1, 2, requires_grad=True)
    run(Lion([alone], lr=0.1, foreach=False), lambda: bowl(alone + 1), 1)
    torch.testing.assert_close(b, alone)
    torch.testing.assert_close(c.float(), alone)
    assert c.dtype == torch.float64
    assert opt.state[a]["step"] == 3


def test_half_precision_together():
    params = [torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    opt = Lion(params, lr=0.1)
    sum(p.square().sum() for p in params).backward()
    opt.step()
    assert all(opt.state[p]["mean"].dtype == torch.float32 for p in params)
    assert params[0].tolist() == [[pytest.approx(0.9, abs=4e-3)] * 2] * 2
