"""Products with few columns are transposed, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from metagrad.autograd.narrow import TransposeNarrow


@pytest.mark.parametrize(
    ("rows", "columns", "narrow"),
    [(40, 10, True), (16, 2, True), (40, 16, False), (15, 10, False), (40, 1, False)],
)
def test_exactly_the_narrow_products_are_transposed(rows, columns, narrow):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, *size, generator=generator) for size in ((rows, 7), (7, columns)))
    module = make_fx(torch.bmm)(a, b)
    for node, value in zip(module.graph.find_nodes(op="placeholder"), (a, b), strict=True):
        node.meta["val"] = value
    TransposeNarrow()(module.graph)
    module.recompile()
    torch.testing.assert_close(module(a, b), a @ b)
    assert ("permute" in module.code) == narrow
