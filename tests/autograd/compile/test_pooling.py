"""The gradient of max-pooling as compiled code has it, against torch's operation."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_inductor_cache

from metagrad.autograd.compile import backend
from metagrad.autograd.compile.pooling import pooling_gradient

OPERATION = torch.ops.aten.max_pool2d_with_indices_backward.default


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(2).round().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "window"),
    [((2, 3, 6, 6), (2, 2)), ((3, 7, 9), (2, 2)), ((2, 2, 7, 8), (3, 2)), ((1, 1, 5, 5), (1, 5))],
)
def test_the_first_of_the_largest_has_the_gradient(shape, window, dtype):
    x = drawn(*shape, dtype=dtype)
    y, indices = F.max_pool2d(x, window, return_indices=True)
    g = drawn(*y.shape, dtype=dtype) + 0.5
    g.view(-1)[0] = torch.inf
    args = [*window], [*window], [0, 0], [1, 1], False, indices
    assert torch.equal(pooling_gradient(g, x, *args), OPERATION(g, x, *args))


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "ceil_mode"),
    [
        ([1, 1], [0, 0], [1, 1], False),
        ([2, 2], [1, 1], [1, 1], False),
        ([2, 2], [0], [2], False),
        ([], [0], [1], True),
    ],
)
def test_windows_that_overlap_are_left_to_torch(stride, padding, dilation, ceil_mode):
    x = drawn(1, 1, 5, 5)
    assert (
        pooling_gradient(x[..., :2, :2], x, [2, 2], stride, padding, dilation, ceil_mode, None)
        is NotImplemented
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_code_takes_it(monkeypatch):
    ours = mock.Mock(wraps=pooling_gradient)
    monkeypatch.setattr(backend, "pooling_gradient", ours)
    x, w = drawn(2, 3, 7, 6), drawn(3, 1, 1).requires_grad_()

    def slopes(function):
        return torch.autograd.grad(function(x, w), [w])

    def loss(x, w):
        return F.max_pool2d((x * w).tanh(), 2).square().sum()

    with fresh_inductor_cache():
        compiled = torch.compile(loss, backend=backend.Backend())
        torch.testing.assert_close(slopes(compiled), slopes(loss))
    ours.assert_called()
