"""Writes into tensors whose entries have memory in common, in compiled graphs."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import fresh_inductor_cache
from torch.fx.experimental.proxy_tensor import make_fx

from metagrad.autograd.compile.backend import Backend
from metagrad.autograd.compile.writes import may_overlap, separate_entries

ROWS = torch.tensor([0, 1, 2, 3, 5, 7])
VALUES = torch.linspace(-1.0, 2.0, 18).view(3, 6)

WRITES = {
    "index_put": lambda v, i: torch.vmap(lambda v: torch.zeros(8, 8).index_put((i, i), v))(v),
    "accumulate": lambda v, i: torch.vmap(lambda v: torch.zeros(8).index_put((i,), v, accumulate=True))(v),
    "rows": lambda v, i: torch.zeros(3, 1).expand(3, 8).index_put((torch.arange(3)[:, None], i), v),
    "windows": lambda v, i: torch.zeros(8).unfold(0, 6, 1).index_put((i[:3],), v),
    "diagonal": lambda v, i: torch.vmap(lambda v: torch.zeros(6, 8).diagonal_scatter(v))(v),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_may_overlap_is_copied(name):
    module = make_fx(lambda v, i: WRITES[name](v, i), tracing_mode="fake")(VALUES, ROWS)
    copies = len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))
    separate_entries(module.graph)
    module.recompile()
    module.graph.lint()
    found = module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert len(found) == copies + 1
    assert not may_overlap(found[-1].meta["val"])
    torch.testing.assert_close(module(VALUES, ROWS), WRITES[name](VALUES, ROWS))


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.zeros(3, 4), False),
        (torch.zeros(3, 4).mT, False),
        (torch.zeros(3, 4)[:, ::2], False),
        (torch.zeros(3, 1).expand(3, 1), False),
        (torch.zeros(0, 4).expand(2, 0, 4), False),
        (torch.zeros(()), False),
        (torch.zeros(4).expand(3, 4), True),
        (torch.zeros(1).expand(4), True),
        (torch.zeros(8).unfold(0, 3, 2), True),
        (torch.zeros(9).unfold(0, 3, 3), False),
    ],
)
def test_entries_in_common(tensor, overlaps):
    assert may_overlap(tensor) == overlaps


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch._prims_common.check. is deprecated:FutureWarning")
def test_compiled_code_gives_each_example_its_own_values():
    def function(v, i):
        return [write(v, i) for write in WRITES.values()]

    with fresh_inductor_cache():
        compiled = torch.compile(function, backend=Backend())
        torch.testing.assert_close(compiled(VALUES, ROWS), function(VALUES, ROWS))
