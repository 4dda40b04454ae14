from __future__ import annotations

import torch

from metagrad.autograd.checks import nodes


def test_a_node_of_cpp_is_not_a_custom_function():
    assert not nodes.is_once_differentiable(torch.ones(1, requires_grad=True).sin().grad_fn)


def test_an_argument_that_a_node_does_not_tell_counts_as_set():
    node = torch.ones(1, requires_grad=True).sin().grad_fn
    assert nodes.flag("_saved_of_another_version")(node)
