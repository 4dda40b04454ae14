"""The gradients of pooling as compiled code has them, against torch's operations."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_inductor_cache

from metagrad.autograd.compile import backend
from metagrad.autograd.compile.pooling import max_gradient, mean_gradient

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
    assert torch.equal(max_gradient(g, x, *args), OPERATION(g, x, *args))


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
        max_gradient(x[..., :2, :2], x, [2, 2], stride, padding, dilation, ceil_mode, None) is NotImplemented
    )


@pytest.mark.slow
def test_compiled_code_takes_them(monkeypatch):
    ours = mock.Mock(wraps=max_gradient)
    monkeypatch.setattr(backend, "max_gradient", ours)
    x, w = drawn(2, 3, 7, 6), drawn(3, 1, 1).requires_grad_()

    def slopes(function):
        return torch.autograd.grad(function(x, w), [w])

    def loss(x, w):
        y = (x * w).tanh()
        return F.max_pool2d(y, 2).square().sum() + F.avg_pool2d(y, 3, 2, ceil_mode=True).square().sum()

    with fresh_inductor_cache():
        compiled = torch.compile(loss, backend=backend.Backend())
        torch.testing.assert_close(slopes(compiled), slopes(loss))  # the means' was off by a tenth
    ours.assert_called()


LAST_WINDOWS = [  # size, width, stride, padding; of both, the last reaches beyond the padded input
    (6, 3, 2, 0),
    (5, 3, 3, 0),
    (7, 4, 3, 1),
]


def averages(dims, size, width, stride, padding, **flags):
    """Return an average pooling as compiled code takes it: the means and a function of their gradient."""
    x = drawn(2, 3, *range(size, size + dims * stride, stride), dtype=torch.float64)
    forward = {2: F.avg_pool2d, 3: F.avg_pool3d}[dims]
    operation = {2: torch.ops.aten.avg_pool2d_backward, 3: torch.ops.aten.avg_pool3d_backward}[dims]
    g = drawn(*forward(x, width, stride, padding, **flags).shape, dtype=torch.float64)
    flags = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None, **flags}
    return operation, (g, x, [width] * dims, [stride] * dims, [padding] * dims, *flags.values())


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("size", "width", "stride", "padding"), LAST_WINDOWS)
def test_a_window_that_reaches_beyond_the_input_shares_its_gradient_among_what_is_there(
    dims, size, width, stride, padding
):
    operation, args = averages(dims, size, width, stride, padding, ceil_mode=True)
    torch.testing.assert_close(mean_gradient(*args), operation(*args), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "settings",
    [
        (6, 3, 3, 0, {"ceil_mode": True}),
        (7, 3, 2, 1, {"ceil_mode": True}),
        (6, 3, 2, 0, {}),
        (6, 3, 2, 0, {"ceil_mode": True, "count_include_pad": False}),
        (6, 3, 2, 0, {"ceil_mode": True, "divisor_override": 5}),
    ],
)
def test_other_averages_are_left_to_torch(settings):
    *window, flags = settings
    _, args = averages(2, *window, **flags)
    assert mean_gradient(*args) is NotImplemented
