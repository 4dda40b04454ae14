"""Finite differences along directions in all inputs at once, at the cost of one input."""

from __future__ import annotations

import torch
from torch import Tensor

import metagrad as mg
from metagrad.core.tree import tree_flatten, tree_unflatten


def joint_gradcheck(fn, inputs, *, directions=2, **options) -> bool:
    """Check ``fn`` as :func:`metagrad.gradcheck` does, with random directions in all inputs together.

    A gradient that is wrong in one input is wrong along almost every such direction. The error does not
    name the input.
    """
    leaves, spec = tree_flatten(tuple(inputs))
    checked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    shapes = [leaves[i].shape for i in checked]

    def of_vector(vector):
        filled = list(leaves)
        parts = vector.split([shape.numel() for shape in shapes])
        for i, part, shape in zip(checked, parts, shapes, strict=True):
            filled[i] = part.view(shape)
        return fn(*tree_unflatten(filled, spec))

    vector = torch.cat([leaves[i].detach().reshape(-1) for i in checked]).requires_grad_()
    return mg.gradcheck(of_vector, vector, directions=directions, **options)
