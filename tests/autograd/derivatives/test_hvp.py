"""Hessian-vector products in every mode against a dense Hessian, and against finite differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import metagrad as mg
from metagrad.autograd import hvp
from metagrad.memory.storages import StorageCounter, StorageMode
from tests.autograd.hessians import dense_hessian, flat
from tests.losses import loss_of

MODES = ["reverse", "forward"]


def squares(prediction, y):
    return (prediction - y).square().mean()


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x, y = torch.randn(5, 3, dtype=dtype), torch.randn(5, 2, dtype=dtype)
    params = {k: p.detach().clone() for k, p in model.named_parameters()}
    return loss_of(model, squares), params, {k: torch.randn_like(p) for k, p in params.items()}, x, y


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_every_mode_is_the_dense_hessian_times_the_vector(mode, create_graph):
    loss, params, v, x, y = problem()
    result = hvp(loss, params, v, x, y, mode=mode, create_graph=create_graph)
    torch.testing.assert_close(result.loss, loss(params, x, y), check_device=False)
    gradient = torch.func.grad(lambda p: loss(p, x, y))(params)
    torch.testing.assert_close(dict(result.gradient), gradient)
    expected = dense_hessian(lambda p: loss(p, x, y), params) @ flat(v)
    torch.testing.assert_close(flat(result.product), expected, rtol=1e-9, atol=1e-12)
    assert list(result.product) == list(params)


@pytest.mark.parametrize("mode", MODES)
def test_results_can_be_differentiated_on_request(mode):
    loss, params, v, x, y = problem()
    names = list(params)

    def results(params, v, y):
        result = hvp(
            loss, dict(zip(names, params, strict=True)), dict(zip(names, v, strict=True)), x, y, mode=mode,
            create_graph=True,
        )  # fmt: skip
        return tuple(result)

    inputs = ([p.requires_grad_() for p in params.values()], [t.requires_grad_() for t in v.values()])
    assert mg.gradcheck(results, (*inputs, y.requires_grad_()), order=1, directions=1)


@pytest.mark.parametrize("mode", MODES)
def test_without_create_graph_nothing_is_kept(mode):
    loss, params, v, x, y = problem()
    for tree in (params, v):
        for tensor in tree.values():
            tensor.requires_grad_()
    with StorageMode(counter := StorageCounter(torch.device("cpu"))):
        result = hvp(loss, params, v, x, y, mode=mode)
    tensors = [result.loss, *result.gradient.values(), *result.product.values()]
    assert not any(t.requires_grad for t in tensors)
    assert counter.total <= sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_parameters_may_be_any_tree(mode):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    result = hvp(
        lambda p: (p[0] ** 3).sum() + p[1]["b"] * 2, [x, {"b": x.sum()}], [x, {"b": x.sum()}], mode=mode
    )
    torch.testing.assert_close(result.product, [6 * x * x, {"b": torch.zeros_like(x.sum())}])


def test_operations_without_forward_derivatives_are_refused_with_the_alternatives():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"no forward derivative: .* Take mode=\"reverse\""):
        hvp(lambda q: F.mse_loss(q, x), x, x, mode="forward")
    with pytest.raises(RuntimeError, match="must match the size"):
        hvp(lambda q: (q - torch.ones(5)).sum(), x, x, mode="forward")
