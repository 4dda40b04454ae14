"""Faults of torch that metagrad works around. A test that fails shows that its workaround can go."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from metagrad.info import _is_newer

pytestmark = pytest.mark.skipif(_is_newer(torch.__version__), reason="the faults are of an older torch")


@pytest.mark.slow
def test_a_compiled_sum_with_a_product_ignores_alpha():
    """So ``plus_scaled`` writes formulas as w + c * d while torch.compile traces them."""
    w, a, b = torch.ones(6, 3), torch.ones(6, 4), torch.ones(4, 3)
    compiled = torch.compile(lambda w, a, b: torch.add(w, a @ b, alpha=-0.1), fullgraph=True)
    assert not torch.allclose(compiled(w, a, b), w - 0.1 * (a @ b), rtol=1e-3)


def test_functional_call_leaves_its_tensors_in_a_module_that_occurs_twice():
    """So ``core.substitution.replaced`` substitutes parameters itself."""
    layer = nn.Linear(1, 1)
    model = nn.Sequential(layer, layer)
    functional_call(model, {n: p.detach() for n, p in model.named_parameters()}, (torch.ones(1, 1),))
    assert not isinstance(layer.weight, nn.Parameter)
