"""A context manager for code that must not be dense."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class no_large_outputs(TorchDispatchMode):
    """Raise ``AssertionError`` if an operation allocates a dense tensor of more than ``limit`` elements."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(
            issubclass(t, torch.Tensor) and t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
            for t in types
        ):
            return NotImplemented  # a wrapper, whose parts are computed later
        out = func(*args, **kwargs or {})
        known = {storage(t) for t in tensors((args, kwargs))}
        for tensor in tensors(out):
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            if size > self.limit and storage(tensor) not in known:
                raise AssertionError(f"{func} allocates {size} elements, shape {tuple(tensor.shape)}")
        return out


KINDS = (torch.Tensor, torch.nn.Parameter)


def tensors(tree):
    return [t for t in tree_leaves(tree) if type(t) in KINDS and t.layout is torch.strided]


def storage(tensor):
    return tensor.untyped_storage()._cdata
