"""Attention whose derivatives do not end at the first, as those of torch's fused kernels do."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch.backends import cuda

# Which kernels torch may choose from, on a CPU as well; the last one is not fused.
_KERNELS = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
)


class UnfusedAttention:
    """A context in which ``F.scaled_dot_product_attention`` is matrix products and a softmax, at every order.

    The choice is one for all threads: the first that enters makes it, and the last that leaves takes it back.

    Example:
        >>> from metagrad.core.attention import unfused_attention
        >>> x = torch.eye(2)[None, None].requires_grad_()
        >>> with unfused_attention:
        ...     y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        >>> slope.requires_grad
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before: list[bool] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before = [is_enabled() for is_enabled, _ in _KERNELS]
                _enable([False, False, False, True])
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                _enable(self._before)


def _enable(chosen: Sequence[bool]) -> None:
    for (_, enable), is_chosen in zip(_KERNELS, chosen, strict=True):
        enable(is_chosen)


unfused_attention = UnfusedAttention()
