"""Which torch.func transforms are around a call, and what that means for derivatives that are taken on the tape."""

from __future__ import annotations

from torch import Tensor

from metagrad.core import _torch


def is_transformed() -> bool:
    """Say whether a torch.func transform is active."""
    return _torch.functorch_is_active()


def is_differentiated() -> bool:
    """Say whether a transform is active that differentiates: a constant would silently have a derivative of zero."""
    return is_transformed() and any(kind != _torch.TransformType.Vmap for kind in _kinds())


def is_on_the_tape(tensors: list[Tensor]) -> bool:
    """Say whether reverse mode is all that is active, and its innermost level differentiates all of the tensors."""
    return all(kind == _torch.TransformType.Grad for kind in _kinds()) and all(
        tensor.requires_grad and _torch.functorch_level_of(tensor) == _torch.functorch_level()
        for tensor in tensors
    )


def _kinds() -> list[_torch.TransformType]:
    return [interpreter.key() for interpreter in _torch.get_interpreter_stack() or ()]
