"""Operations whose second derivatives are quicker than torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.autograd.derivatives.quick.convolutions import CONVOLUTIONS
from metagrad.autograd.derivatives.quick.norms import NORMS
from metagrad.autograd.derivatives.quick.pooling import POOLING
from metagrad.core import _torch
from metagrad.core.norms import composite_norms
from metagrad.core.tape import is_transformed

_REPLACED = {**CONVOLUTIONS, **NORMS, **POOLING}


class QuickDerivatives(TorchFunctionMode):
    """In this context, convolutions and norms have quick second derivatives, and right ones beyond.

    Those of layer, batch and instance norm are wrong from the third on in torch (2.13); a transposed convolution with
    output padding has none, nor has attention by a fused kernel, in place of which another kernel is taken. On a CPU
    the statistics of a batch and the maxima of windows that do not overlap are taken in a third of torch's time. In
    transforms of torch.func, as for stacked tasks, norms are written out as by
    :class:`~metagrad.models.composite_norms`, and all else is torch's, as are calls in forward mode, under autocast,
    in code that is compiled, and of subclasses of tensors. Wherever it is entered, it is the outermost of the
    function modes: a checkpoint's sees the functions of torch that are called.

    Example:
        >>> x, w = torch.ones(1, 1, 3), torch.tensor([[[2.0, 1.0]]], requires_grad=True)
        >>> with metagrad.autograd.QuickDerivatives():
        ...     loss = torch.nn.functional.conv1d(x, w).square().sum()
        >>> with metagrad.autograd.linearize(loss, w) as lin:
        ...     lin.hvp(torch.ones_like(w))
        tensor([[[8., 8.]]])
    """

    def __enter__(self) -> QuickDerivatives:
        unfused_attention.__enter__()
        _place([self, *_taken()])
        return self

    def __exit__(self, *_: object) -> None:
        _place(_taken()[1:])
        unfused_attention.__exit__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        replacement = _REPLACED.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        if is_transformed() and _torch.forward_level() < 0 and not torch.compiler.is_compiling():
            with composite_norms():
                return func(*args, **(kwargs or {}))
        found = replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found


def _taken() -> list[TorchFunctionMode]:
    """Take all modes off their stack, and return them, the outermost first."""
    return [_torch.pop_function_mode() for _ in range(_torch.num_function_modes())][::-1]


def _place(modes: Sequence[TorchFunctionMode]) -> None:
    for mode in modes:
        _torch.push_function_mode(mode)
