"""The ways in which results resize Omniglot's drawings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def resize_nearest(drawings: Tensor, size: int) -> Tensor:
    """Pick the pixel under the centre of each new pixel.

    Pillow does this to images of mode "1" whatever filter it is asked for, so code that resizes the files as
    they are (MAML's, prototypical networks') trains on it. Pixel i comes from floor((i + 1/2) * old / new).

    Args:
        drawings: Levels, [drawings, side, side] uint8.
        size: Pixels along a side of the result.

    Returns:
        Levels, [drawings, size, size] uint8.
    """
    source = [(2 * i + 1) * drawings.shape[-1] // (2 * size) for i in range(size)]
    return drawings[:, source][:, :, source]


def resize_area(drawings: Tensor, size: int) -> Tensor:
    """Average over the area that each new pixel covers, counting pixels that it covers in part by that part.

    Args:
        drawings: Levels 0 to 255, [drawings, side, side] uint8.
        size: Pixels along a side of the result.

    Returns:
        Levels, [drawings, size, size] uint8, rounded.
    """
    weights = _covered_parts(drawings.shape[-1], size, drawings.device)
    return (weights @ (drawings.float() @ weights.T)).round().clamp(0, 255).to(torch.uint8)


def _covered_parts(old: int, new: int, device: torch.device) -> Tensor:
    """Return which part of new pixel i lies on old pixel j, [new, old]; rows sum to one."""
    scale, start = old / new, torch.arange(old, device=device)
    left = scale * torch.arange(new, device=device).unsqueeze(1)
    covered = torch.minimum(left + scale, start + 1) - torch.maximum(left, start)
    return covered.clamp(min=0) / scale


RESIZERS: dict[str, Callable[[Tensor, int], Tensor]] = {"nearest": resize_nearest, "area": resize_area}
