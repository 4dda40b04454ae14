"""Which torch.func transforms are around a call, and what that means for derivatives that are taken on the tape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import TransformType, maybe_current_level, maybe_get_level
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters


def is_transformed() -> bool:
    """Say whether a torch.func transform is active."""
    return torch._C._are_functorch_transforms_active()


def is_differentiated() -> bool:
    """Say whether a transform is active that differentiates, to which a constant would be a zero in silence."""
    return is_transformed() and any(kind != TransformType.Vmap for kind in _kinds())


def is_on_the_tape(tensors: list[Tensor]) -> bool:
    """Say whether reverse mode is all that is active, and its innermost level differentiates all of the tensors."""
    return all(kind == TransformType.Grad for kind in _kinds()) and all(
        tensor.requires_grad and maybe_get_level(tensor) == maybe_current_level() for tensor in tensors
    )


def _kinds() -> list[TransformType]:
    return [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]
