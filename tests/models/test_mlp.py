import pytest
import torch
from torch import nn

from metagrad.models import MLP


def test_the_formula():
    model = MLP([2, 3, 1], activation=nn.Tanh).double()
    (w1, b1, w2, b2), x = model.parameters(), torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(model(x), torch.tanh(x @ w1.T + b1) @ w2.T + b2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sizes", [[], [3], [1, 0, 1], [2, -1]])
def test_sizes_that_make_no_network(sizes):
    with pytest.raises(ValueError, match=r"MLP\(sizes\): sizes must be the features of input, .* got \["):
        MLP(sizes)
