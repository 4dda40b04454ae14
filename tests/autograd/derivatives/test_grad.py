from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import metagrad as mg


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "params",
    [
        leaf(1.0, 2.0),
        {"b": leaf(1.0), "a": leaf(2.0, 3.0)},
        [leaf(1.0), (leaf(2.0), {"k": leaf(3.0)})],
        Pair(leaf(1.0), leaf(2.0)),
    ],
    ids=["tensor", "dict", "nested", "namedtuple"],
)
def test_gradient_of_a_sum_of_cubes_has_the_tree_of_the_parameters(params):
    leaves, spec = torch.utils._pytree.tree_flatten(params)
    grads = mg.grad(sum((leaf**3).sum() for leaf in leaves), params)
    got, got_spec = torch.utils._pytree.tree_flatten(grads)
    assert got_spec == spec
    for gradient, param in zip(got, leaves, strict=True):
        torch.testing.assert_close(gradient, 3 * param.detach() ** 2)
        assert not gradient.requires_grad


def test_an_unused_parameter_gives_zeros_when_asked():
    params = {"used": leaf(1.0), "unused": leaf(1.0, 2.0)}
    grads = mg.grad(params["used"].sum(), params, materialize_grads=True)
    assert torch.equal(grads["unused"], torch.zeros(2, dtype=torch.float64))


def penalty(gradient: Tensor) -> Tensor:
    return (gradient**3).sum()


REFUSED = {
    "cut at order 2": (
        lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x, (2,)).to_dense(),
        "SparseCooTensorWithDimsAndTensorsBackward0",
    ),
    "wrong at order 2": (
        lambda x: torch._weight_norm(x.view(1, 2), torch.ones(1, 1, dtype=x.dtype), 0),
        "WeightNormInterfaceBackward0.*derivatives of order 2 that are silently wrong.*Write it out",
    ),
    "an error at order 2": (
        torch.nn.functional.hardsigmoid,
        r"HardsigmoidBackward0.*error in derivatives of order 2.*relu6\(x \+ 3\) / 6",
    ),
    "wrong at order 3, in the gradient": (
        lambda x: mg.grad(penalty(torch.nn.functional.layer_norm(x, (2,))), x, create_graph=True),
        "NativeLayerNormBackwardBackward0.*derivatives of order 2 that are silently wrong",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(("fn", "message"), REFUSED.values(), ids=REFUSED)
def test_create_graph_refuses_what_could_not_be_differentiated_again(fn, message):
    x = leaf(1.0, 2.0)
    with pytest.raises(ValueError, match=r"grad\(loss, params, create_graph=True\): " + message):
        mg.grad(penalty(fn(x)), x, create_graph=True)
    assert mg.grad(penalty(fn(x)), x).shape == (2,)  # a last derivative is right, and allowed


def test_what_lies_behind_the_parameters_is_not_looked_at():
    x = leaf(1.0, 2.0)
    param = torch.nn.functional.hardsigmoid(x)
    assert mg.grad(penalty(param), param, create_graph=True).requires_grad


def _complex(p, *batch):
    return (p["w"].sum() * (1 + 2j)).square()


@pytest.mark.parametrize(
    "derivative",
    [
        lambda p: mg.grad(_complex(p), p),
        lambda p: mg.grad(_complex(p), p, create_graph=True),
        lambda p: mg.hvp(_complex, p, p),
        lambda p: mg.hvp(_complex, p, p, mode="forward"),
        lambda p: mg.autograd.linearize(_complex(p), p),
        lambda p: mg.hessian(_complex(p), p),
    ],
)
def test_the_real_part_of_a_complex_loss_is_not_taken_for_it(derivative):
    params = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    with pytest.raises(ValueError, match=r"the loss must be real, got torch.complex64"):
        derivative(params)


def test_complex_parameters_of_a_real_loss_have_torchs_gradient():
    w = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    assert torch.equal(mg.grad(w.abs().square().sum(), w), 2 * w.detach())
