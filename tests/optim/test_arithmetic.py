from __future__ import annotations

import torch

from metagrad.optim.arithmetic import root


def test_root_has_zero_derivatives_at_zero_and_the_roots_elsewhere():
    x = torch.tensor([0.0, 4.0, 9.0], dtype=torch.float64, requires_grad=True)
    y = root(x)
    assert y.tolist() == [0, 2, 3]
    first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    assert first.tolist() == [0, 1 / 4, 1 / 6]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(second, torch.tensor([0, -1 / 32, -1 / 108], dtype=torch.float64))
    assert torch.autograd.grad(second.sum(), x)[0][0] == 0
    assert root(torch.tensor([float("nan"), -1.0])).isnan().all()
