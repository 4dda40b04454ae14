from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from metagrad.models import MLP


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5))
@settings(max_examples=20, deadline=None)
def test_shape_and_number_of_parameters(sizes):
    model = MLP(sizes)
    assert model(torch.zeros(3, 2, sizes[0])).shape == (3, 2, sizes[-1])
    expected = sum(sizes[k] * sizes[k + 1] + sizes[k + 1] for k in range(len(sizes) - 1))
    assert sum(p.numel() for p in model.parameters()) == expected


def test_the_formula():
    model = MLP([2, 3, 1], activation=nn.Tanh).double()
    (w1, b1, w2, b2), x = model.parameters(), torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(model(x), torch.tanh(x @ w1.T + b1) @ w2.T + b2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sizes", [[], [3], [1, 0, 1], [2, -1]])
def test_sizes_that_make_no_network(sizes):
    with pytest.raises(ValueError, match=r"MLP\(sizes\): sizes must be the features of input, .* got \["):
        MLP(sizes)
