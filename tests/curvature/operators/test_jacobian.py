"""The Jacobian of a function of one example, against torch.func on all examples."""

import pytest
import torch
from torch import nn

import metagrad as mg
from metagrad.curvature import jacobian
from metagrad.models import composite_norms

F64 = torch.float64


def network(norm: bool):
    torch.manual_seed(0)
    layers = [nn.Linear(2, 5), nn.LayerNorm(5) if norm else nn.Identity(), nn.Tanh(), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).to(F64)
    return model, dict(model.named_parameters()), torch.randn(7, 2, dtype=F64)


def laplacian(model, params, x):
    def u(x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    return torch.func.jacrev(torch.func.grad(u))(x).diagonal().sum()


@pytest.mark.parametrize("kind", ["values", "laplacian"])
@pytest.mark.parametrize("norm", [False, True])
def test_products_and_rows_are_those_of_the_dense_matrix(kind, norm):
    model, params, data = network(norm)

    def fn(params, x):
        if kind == "laplacian":  # rows take third derivatives, which torch's fused norm has wrong
            return laplacian(model, params, x)
        return torch.func.functional_call(model, params, (x,))

    with composite_norms():
        parts = [torch.func.jacrev(fn)(params, x) for x in data]
    expected = torch.cat([torch.cat([p[key].flatten(p[key].ndim - params[key].ndim).reshape(
        -1, params[key].numel()) for key in params], 1) for p in parts])  # fmt: skip
    J = jacobian(fn, params, data, chunk=1)
    assert J.shape == expected.shape
    torch.testing.assert_close(J.rows(), expected, rtol=1e-12, atol=1e-12)
    v, u = (torch.randn(3, size, dtype=F64) for size in reversed(expected.shape))
    torch.testing.assert_close(J @ v, v @ expected.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(J @ J.space.unflatten(v[0]), expected @ v[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(J.T @ u, u @ expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(J.T @ u[0], u[0] @ expected, rtol=1e-12, atol=1e-12)
    kernel = mg.curvature.eigenvalues(J.gram(), 2)
    values = torch.linalg.eigvalsh(expected @ expected.T)
    torch.testing.assert_close(kernel.values.sort().values, values[-2:], rtol=1e-8, atol=0)


def test_examples_may_be_several_arguments_and_parameters_stay():
    model, params, data = network(False)
    y = torch.randn(7, dtype=F64)
    J = jacobian(lambda p, x, y: torch.func.functional_call(model, p, (x,))[0] - y, params, (data, y))
    torch.testing.assert_close(J.values, model(data)[:, 0] - y)
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(ValueError, match="was written since"):
        J.rows()


def test_wrong_inputs_are_errors():
    _, params, data = network(False)
    with pytest.raises(ValueError, match="same examples"):
        jacobian(lambda p, x, y: x, params, (data, data[:3]))
    with pytest.raises(ValueError, match="same examples, 1 or more"):
        jacobian(lambda p, x: p["0.bias"].sum(), params, data[:0])
    with pytest.raises(TypeError, match="must return a floating point tensor"):
        jacobian(lambda p, x: x, params, data)
    J = jacobian(lambda p, x: p["0.bias"].sum() + p["0.weight"].sum() * x.sum(), {
        key: params[key] for key in ("0.weight", "0.bias")}, data)  # fmt: skip
    with pytest.raises(ValueError, match=r"J @ v: expected \[15\]"):
        J @ torch.zeros(7, dtype=F64)
