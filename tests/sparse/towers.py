"""Gradients of gradients, each contracted so that a cut graph or a linear shortcut would show."""

import torch


def tower(fn, inputs, order=3):
    """Return the gradients of every order up to ``order``, of all inputs at once, so in mixed orders."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    level = [fn(*inputs)]
    found = []
    for _ in range(order):
        level = torch.autograd.grad(sum((g + g**3).sum() for g in level), inputs, create_graph=True)
        assert all(g.requires_grad for g in level)
        found += level
    return [g.detach() for g in found]


def assert_same_tower(fn, oracle, inputs, *, order=3, rtol=1e-10):
    """Compare two functions and their derivatives, each relative to its size."""
    pairs = zip(
        [fn(*inputs), *tower(fn, inputs, order)],
        [oracle(*inputs), *tower(oracle, inputs, order)],
        strict=True,
    )
    for index, (got, expected) in enumerate(pairs):
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(
            got, expected, rtol=0, atol=rtol * scale, msg=lambda m, i=index: f"derivative {i}: {m}"
        )
