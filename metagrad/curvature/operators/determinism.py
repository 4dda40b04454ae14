"""Whether two passes over the same data give the same, and if not, what moved and why it may have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from metagrad.core import _torch
from metagrad.core.tree import Tree


def refuse_moving(
    call: str,
    first: tuple[Tensor, Tensor, Tensor],
    second: tuple[Tensor, Tensor, Tensor],
    model: nn.Module | None,
    batches: Iterable[Tree],
) -> None:
    """Raise if loss, gradient and product of two passes differ by more than rounding.

    Args:
        call: How the error names the caller.
        first: What one pass gave.
        second: What the next did.
        model: Where to look for layers that may be the reason.
        batches: The data.

    Raises:
        ValueError: The root of the rounding unit is exceeded; what moved is named.
    """
    distances = [_distance(a, b) for a, b in zip(first, second, strict=True)]
    bound = torch.finfo(first[1].dtype).eps ** 0.5
    moved = [
        f"the {name} by {distance:.1e}"
        for name, distance in zip(("loss", "gradient", "product"), distances, strict=True)
        if not distance <= bound
    ]
    if moved:
        raise ValueError(
            f"{call}: two passes over the data differ, relatively: {', '.join(moved)}. {_reasons(model, batches)} To "
            "go on nevertheless, pass check_deterministic=False."
        )


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of a difference, relative to the vectors; nan where either has one."""
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp(min=torch.finfo(a.dtype).tiny))


def _reasons(model: nn.Module | None, batches: Iterable[Tree]) -> str:
    """Name what may have made two passes differ."""
    training = [
        (name or "the model", m) for name, m in (model.named_modules() if model else ()) if m.training
    ]
    dropout = [f"{name} ({type(m).__name__})" for name, m in training if _has_dropout(m)]
    norms = [f"{name} ({type(m).__name__})" for name, m in training if isinstance(m, _torch.BatchNorm)]
    reasons = []
    if dropout:
        reasons.append(f"In training mode {', '.join(dropout)} draws a mask each time: call .eval() on it.")
    if norms:
        reasons.append(
            f"In training mode {', '.join(norms)} normalises by the batch, so that it matters which data are in "
            "one: call .eval() on it, or fix the batches."
        )
    if isinstance(getattr(batches, "sampler", None), torch.utils.data.RandomSampler):
        reasons.append("The DataLoader shuffles: pass shuffle=False.")
    return " ".join(reasons) or (
        "Look for dropout or BatchNorm in training mode, random augmentation, and a loader that shuffles."
    )


def _has_dropout(module: nn.Module) -> bool:
    rate = getattr(module, "dropout", None)  # of attention and recurrent layers
    return isinstance(module, _torch.Dropout) or (isinstance(rate, float) and rate > 0)
