from __future__ import annotations

import pytest
import torch

from metagrad.sparse.tables.clip import clip_grad_norm_
from metagrad.sparse.tables.row_sparse import RowSparse


def parameters():
    """Three parameters whose gradients are RowSparse, uncoalesced COO and strided, and one without."""
    generator = torch.Generator().manual_seed(0)
    grads = [
        RowSparse(torch.tensor([0, 2]), torch.randn(2, 3, generator=generator), (4, 3)),
        torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 3]]), torch.randn(3, 3, generator=generator), (4, 3), check_invariants=True
        ),
        torch.randn(5, generator=generator),
    ]
    params = [torch.zeros(g.shape, requires_grad=True) for g in grads]
    for param, gradient in zip(params, grads, strict=True):
        param.grad = gradient
    return [*params, torch.zeros(2, requires_grad=True)]


def dense_parameters():
    dense = parameters()
    for param in dense[:2]:
        param.grad = param.grad.to_dense()
    return dense


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.7, 1e3])
def test_equals_torch_on_dense_gradients(norm_type, max_norm):
    ours, theirs = parameters(), dense_parameters()
    total = clip_grad_norm_(ours, max_norm, norm_type)
    torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a.grad.to_dense(), b.grad)
    assert isinstance(ours[0].grad, RowSparse)
    assert ours[1].grad.layout is torch.sparse_coo


def test_takes_one_parameter_a_generator_and_none():
    param = parameters()[2]
    assert torch.equal(clip_grad_norm_(param, 1.0), clip_grad_norm_(parameters()[2:3], 1.0))
    assert clip_grad_norm_((p for p in [param]), 1.0) <= 1.0
    assert clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_gradient_without_rows_has_norm_zero(norm_type):
    param = torch.zeros(3, 2, requires_grad=True)
    param.grad = RowSparse(torch.empty(0, dtype=torch.int64), torch.empty(0, 2), (3, 2))
    assert clip_grad_norm_([param], 1.0, norm_type) == 0


def test_a_norm_that_is_not_finite_raises_before_anything_changes():
    params = parameters()
    params[2].grad[0] = float("nan")
    before = params[0].grad.to_dense()
    with pytest.raises(RuntimeError, match=r"the norm of order 2.0 of the gradients is nan"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert torch.equal(params[0].grad.to_dense(), before)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"norm_type.*above 0, got 0"):
        clip_grad_norm_(parameters(), 1.0, 0)
    param = torch.zeros(2, 2).to_sparse_csr().requires_grad_()
    param.grad = torch.eye(2).to_sparse_csr()
    with pytest.raises(ValueError, match=r"must be strided, RowSparse or sparse COO, got torch.sparse_csr"):
        clip_grad_norm_([param], 1.0)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_norm_beyond_float16_does_not_make_zeros(sparse):
    values = torch.full((100, 900), 300.0, dtype=torch.float16)
    w = torch.zeros(100, 900, dtype=torch.float16, requires_grad=True)
    w.grad = RowSparse(torch.arange(100), values, values.shape) if sparse else values
    assert float(clip_grad_norm_([w], max_norm=300.0)) == pytest.approx(90_000, rel=1e-3)
    assert w.grad.dtype == torch.float16
    torch.testing.assert_close(w.grad.to_dense(), torch.ones_like(w), rtol=2e-3, atol=0)
