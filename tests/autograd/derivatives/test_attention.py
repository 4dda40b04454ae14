"""Attention. Its fused kernels have no second derivative, so another kernel computes it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

import metagrad as mg
from metagrad.tasks import Batch
from tests.meta.textbook import textbook


class Attention(nn.Module):
    """One attention layer and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.readout = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.attention(x, x, x, need_weights=False)[0]).mean((1, 2))


@pytest.fixture
def problem():
    """A model, its parameters and examples of three tasks."""
    torch.manual_seed(0)
    model = Attention().double()
    return model, dict(model.named_parameters()), torch.randn(3, 5, 6, 4).double(), torch.randn(3, 5).double()


def permitted() -> list[bool]:
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"memory": "step"}, {"task_chunk": 1}, pytest.param({"compile": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_maml(problem, options):
    model, params, xs, ys = problem
    before = permitted()
    maml = mg.MAML(copy.deepcopy(model), F.mse_loss, inner=mg.optim.rules.sgd(lr=0.1), steps=2, **options)
    maml(((xs, ys), (xs, ys))).loss.backward()
    with sdpa_kernel(SDPBackend.MATH):
        textbook(model, F.mse_loss, Batch((xs, ys), (xs, ys)), lr=0.1, steps=2).mean().backward()
    for found, p in zip(maml.model.parameters(), params.values(), strict=True):
        torch.testing.assert_close(found.grad, p.grad)
    assert permitted() == before


def test_products_with_hessians_and_gauss_newton_matrices(problem):
    model, params, (x, *_), (y, *_) = problem
    v = {name: torch.randn_like(p) for name, p in params.items()}

    def loss(params, x, y):
        return (torch.func.functional_call(model, params, (x,)) - y).square().mean()

    with sdpa_kernel(SDPBackend.MATH):
        slopes = torch.autograd.grad(loss(params, x, y), list(params.values()), create_graph=True)
        products = torch.autograd.grad(slopes, list(params.values()), list(v.values()))
    expected = dict(zip(params, products, strict=True))
    for mode in ("reverse", "forward"):
        torch.testing.assert_close(mg.hvp(loss, params, v, x, y, mode=mode).product, expected)
    with mg.hessian(loss, params, (x, y)) as H:
        torch.testing.assert_close(H @ v, expected)
    found = []
    for create_graph in (False, True):
        with mg.ggn(model, F.mse_loss, params, (x, y), create_graph=create_graph) as G:
            found.append(G @ v)
    torch.testing.assert_close(*found)
