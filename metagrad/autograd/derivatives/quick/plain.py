"""Which tensors operations with derivatives of ours take, and what they are on the tape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core.tape import is_transformed


class QuickFunction(torch.autograd.Function):
    """Stands for a function of torch, on whose arguments alone its derivatives depend."""


def is_plain(*arguments: Any) -> bool:
    """Say whether a call is one of plain tensors of one real dtype, on a tape that only runs backwards.

    Not of subclasses; nor in transforms of torch.func and forward mode, under autocast, in code that is compiled,
    below another mode, or in torch's checkpoint, which compares tensors that are saved with those that it recomputes,
    without this mode.

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
        and not _is_in_torch_checkpoint()
        and _torch.forward_level() < 0
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )


def _is_in_torch_checkpoint() -> bool:
    hooks = _torch.innermost_saved_tensors_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
