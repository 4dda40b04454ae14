"""Parameters by name and as one flat vector, of every form."""

import pytest
import torch

import metagrad as mg
from metagrad.curvature.operators.space import ParameterSpace
from metagrad.sparse import Pattern, SparseTensor


def everything(dtype=torch.float64):
    pattern = Pattern(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), (2, 2))
    return {
        "net.weight": torch.randn(2, 3, dtype=dtype),
        "net.bias": torch.randn((), dtype=dtype),
        "sparse": SparseTensor(pattern, torch.randn(3, dtype=dtype)),
        "empty": torch.randn(0, 3, dtype=dtype),
    }


def test_flat_vectors_hold_the_coordinates_in_the_order_of_the_dict():
    params = everything()
    space = ParameterSpace(params)
    assert space.size == 6 + 1 + 3
    flat = space.flatten(params)
    expected = [
        params["net.weight"].flatten(), params["net.bias"].flatten(), params["sparse"].values,
    ]  # fmt: skip
    assert torch.equal(flat, torch.cat(expected))
    assert torch.equal(flat[space.slices["sparse"]], params["sparse"].values)
    assert space.name_at(6) == "net.bias"
    assert (space.dtype, space.device) == (torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("leading", [(), (3,)])
def test_unflatten_undoes_flatten_for_vectors_and_stacks(leading):
    space = ParameterSpace(everything())
    flat = torch.randn(*leading, space.size, dtype=torch.float64)
    tree = space.unflatten(flat)
    assert tree["net.weight"].shape == (*leading, 2, 3)
    assert isinstance(tree["sparse"], SparseTensor)
    assert torch.equal(space.flatten(tree), flat)
    assert torch.equal(space.join(space.split(flat)), flat)


def test_both_ways_are_differentiable():
    space = ParameterSpace(everything())

    def round_trip(flat):
        tree = space.unflatten(flat)
        return space.flatten({**tree, "net.bias": tree["net.bias"] ** 2})

    flat = torch.randn(space.size, dtype=torch.float64, requires_grad=True)
    assert mg.gradcheck(round_trip, flat, order=2)


def test_blocks_by_name_and_prefix():
    space = ParameterSpace({k: torch.zeros(2) for k in ("a.w", "ab.w", "b", "a.inner.w")})
    assert space.block("a").names == ["a.w", "a.inner.w"]
    assert space.block("a.w").names == ["a.w"]
    assert space.block("b").size == 2
    assert space.places(space.block("a")).tolist() == [0, 1, 6, 7]


def test_spaces_are_the_same_if_coordinates_are():
    params = everything()
    assert ParameterSpace(params).is_same(ParameterSpace(params))
    assert not ParameterSpace(params).is_same(ParameterSpace(everything()))  # other patterns
    assert not ParameterSpace({"w": torch.zeros(2)}).is_same(ParameterSpace({"w": torch.zeros(2).double()}))
