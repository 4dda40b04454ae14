"""Linear maps whose constant part is computed once."""

from __future__ import annotations

import torch

from metagrad.autograd.compile.linear import CompiledLinearMap, compiled_hvp, split_linear
from metagrad.core._torch_compiler import trace

EAGER = {"backend": "eager"}


def rotated(point, vector):
    (angle,), (x, y) = point, vector
    c, s = angle.cos(), angle.sin()
    turned = torch.zeros_like(x)
    turned += c * x - s * y  # written in place
    return [turned, s * x + c * y, s]


def names(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_what_does_not_depend_on_the_vector_is_computed_once():
    point, vector = [torch.tensor(0.3)], [torch.ones(2), torch.zeros(2)]
    constant, linear = split_linear(trace(rotated, point, vector), 1)
    assert {"aten.cos.default", "aten.sin.default"} <= set(names(constant))
    assert set(names(linear)) <= {
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.sub.Tensor",
        "aten.zeros_like.default",
    }
    product = CompiledLinearMap(rotated, point, vector, EAGER)
    for x in (torch.tensor([1.0, 0.0]), torch.tensor([2.0, 5.0])):
        for _ in range(2):
            found = product([x, x])
            expected = rotated(point, [x, x])
            torch.testing.assert_close(found, expected)


def test_a_hessian_product_evaluates_the_loss_once():
    calls = []

    def loss_at(at):
        calls.append(1)
        return (at[0].exp() * at[1]).sum()

    x, y = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    product = compiled_hvp(loss_at, [x, y], forward_only=True, options=EAGER)
    assert len(calls) == 1
    v, w = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    expected = [x.exp() * y * v + x.exp() * w, x.exp() * v]
    for factor in (1, -2):
        torch.testing.assert_close(product([factor * v, factor * w]), [factor * part for part in expected])
    assert len(calls) == 1
