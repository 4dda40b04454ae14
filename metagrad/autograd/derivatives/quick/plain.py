"""Which tensors operations with derivatives of ours take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core.transforms import is_transformed


def is_plain(*arguments: Any) -> bool:
    """Say whether a call is one of plain tensors of one real dtype, on a tape that only runs backwards.

    Not of subclasses; nor in transforms of torch.func and forward mode, under autocast, in code that is compiled,
    below another mode, as of a checkpoint, which has to see all functions of torch that are called, or under hooks of
    saved tensors, by which torch's checkpoint compares what it recomputes without this mode.

    Args:
        *arguments: Tensors, or None, which does not count.
    """
    tensors = [argument for argument in arguments if argument is not None]
    return (
        torch.is_grad_enabled()
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == 1
        and tensors[0].is_floating_point()
        and any(tensor.requires_grad for tensor in tensors)
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and not _torch.num_function_modes()
        and _torch.innermost_saved_tensors_hooks(False) is None
        and _torch.forward_level() < 0
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )
