"""Products with a Jacobian, in batches that bound the memory, or in turn if an operation cannot be batched."""

import pytest
import torch
import torch.nn.functional as F

from metagrad.autograd.derivatives.recorded import BatchedVjp, Recorded, recorded_gradient
from metagrad.memory.storages import StorageCounter, StorageMode


def product_of(loss, w):
    """Return a Hessian product of rows, and the number of rows of each call."""
    recorded, sizes = recorded_gradient("test", loss, {"w": w}), []

    def product(rows):
        sizes.append(len(rows) if rows.ndim > 1 else 1)
        return recorded.pull(rows)

    return product, sizes


def test_pull_and_push_are_products_with_the_jacobian():
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    A = torch.randn(5, 3, dtype=torch.float64)
    recorded = Recorded("test", [(A @ w).sin()], {"w": w})
    J = (A @ w.detach()).cos()[:, None] * A
    torch.testing.assert_close(recorded.pull(torch.eye(5).double()), J)
    torch.testing.assert_close(recorded.push(torch.eye(3).double()), J.t())


def test_a_chunk_bounds_the_working_memory():
    torch.manual_seed(0)
    w, x = torch.randn(64, 8, requires_grad=True), torch.randn(200, 64)
    product, _ = product_of((x @ w).tanh().sum(), w)
    vectors = torch.randn(64, w.numel())
    batched = BatchedVjp()
    for chunk in (200_000, 1_000_000):
        with StorageMode(counter := StorageCounter(torch.device("cpu"))):
            batched.rows(product, vectors, chunk)
        assert counter.peak <= 1.5 * chunk + vectors.nbytes


class Looks(torch.autograd.Function):
    """A function whose derivatives read numbers, which batched tensors do not support."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        assert float(cotangent.detach().sum()) != 7.0
        return cotangent * x.exp()


@pytest.mark.filterwarnings("ignore:.*custom autograd.Function")
@pytest.mark.parametrize("layer", ["custom", "group norm"])
def test_products_that_cannot_be_batched_run_in_turn(layer):
    torch.manual_seed(0)
    w = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)

    def fn(w):
        return (w.exp() if layer == "custom" else F.group_norm(w, 2, eps=0.1)).sin().sum()

    product, _ = product_of(Looks.apply(w).sin().sum() if layer == "custom" else fn(w), w)
    vectors = torch.randn(9, 24, dtype=torch.float64)
    expected = torch.func.jacrev(torch.func.jacrev(fn))(w.detach()).reshape(24, 24)
    found = BatchedVjp().rows(product, vectors, 2**26)
    torch.testing.assert_close(found, vectors @ expected, rtol=1e-9, atol=1e-12)
