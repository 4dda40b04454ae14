"""Products in compiled graphs: which are transposed, and that the graph computes what it did."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from metagrad.autograd.recompute.products import transpose_in

PERMUTE = torch.ops.aten.permute.default


def draw(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, *shape, generator=generator) for shape in shapes]


def passed(function, *inputs):
    """A graph after the pass, which still computes the function."""
    module = make_fx(lambda *xs: function(*xs), tracing_mode="fake")(*inputs)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int):
        # As inductor has them after its own passes.
        with module.graph.inserting_before(node):
            swap = module.graph.call_function(PERMUTE, (node.args[0], [0, 2, 1]))
        swap.meta.update(node.meta)
        node.replace_all_uses_with(swap)
        module.graph.erase_node(node)
    transpose_in(module.graph)
    module.recompile()
    module.graph.lint()
    torch.testing.assert_close(module(*inputs), function(*inputs))
    return module.graph


def swaps_of_results(graph):
    """How many transpositions there are of what was computed, rather than of an input."""
    return sum(
        node.args[0].op != "placeholder" for node in graph.find_nodes(op="call_function", target=PERMUTE)
    )


@pytest.mark.parametrize(
    ("rows", "columns", "narrow"),
    [(40, 10, True), (16, 2, True), (40, 16, False), (15, 10, False), (40, 1, False), (10, 40, False)],
)
def test_exactly_the_narrow_products_are_transposed(rows, columns, narrow):
    graph = passed(torch.bmm, *draw((rows, 7), (7, columns)))
    assert swaps_of_results(graph) == narrow


def test_a_product_that_is_only_read_transposed_is_computed_so():
    a, b, c = draw((20, 7), (7, 30), (30, 20))
    assert swaps_of_results(passed(lambda a, b, c: torch.bmm(a, b).transpose(1, 2) + c, a, b, c)) == 0


def test_a_transposition_moves_through_sums_and_scalings():
    def function(a, b, c, d, rate):
        total = torch.bmm(a, b) + torch.bmm(a, b) * rate - c.transpose(1, 2) * 2
        return d - total.transpose(1, 2)

    a, b, c, d = draw((20, 7), (7, 30), (30, 20), (30, 20))
    graph = passed(function, a, b, c, d, torch.tensor(0.3))
    assert swaps_of_results(graph) == 0
    factors = graph.find_nodes(op="placeholder")[:2]
    assert all(node.args[0] in factors for node in graph.find_nodes(op="call_function", target=PERMUTE))


def other_reader(a, b, c):
    product = torch.bmm(a, b)
    return product.transpose(1, 2) + c, product.exp()


def not_a_product(a, b, c):
    return (torch.bmm(a, b) + c.transpose(1, 2).exp()).transpose(1, 2)


def other_shape(a, b, c):
    return (torch.bmm(a, b) + c[:, :1, :1]).transpose(1, 2)


def would_be_narrow(a, b, c):
    return torch.bmm(a[:, :10], b).transpose(1, 2) + c[:, :, :10]


@pytest.mark.parametrize("function", [other_reader, not_a_product, other_shape, would_be_narrow])
def test_other_transpositions_stay(function):
    a, b, c = draw((20, 7), (7, 30), (30, 20))
    graph = passed(function, a, b, c)
    assert swaps_of_results(graph) >= 1
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)) == 1
