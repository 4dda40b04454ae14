"""Operations whose second derivatives are quicker than torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from metagrad.autograd.derivatives.quick.convolutions import CONVOLUTIONS
from metagrad.autograd.derivatives.quick.norms import NORMS
from metagrad.autograd.derivatives.quick.pooling import POOLING

_REPLACED = {**CONVOLUTIONS, **NORMS, **POOLING}


class QuickDerivatives(TorchFunctionMode):
    """In this context, convolutions and norms have quick second derivatives, and right ones beyond.

    Those of layer, batch and instance norm are wrong from the third on in torch (2.13), and a transposed convolution
    with output padding has none. On a CPU the statistics of a batch and the maxima of windows that do not overlap are
    taken in a third of torch's time. What is done here is on the tape alone: calls in transforms of torch.func, in
    forward mode, under autocast, in code that is compiled, and of subclasses of tensors are torch's.

    Example:
        >>> x, w = torch.ones(1, 1, 3), torch.tensor([[[2.0, 1.0]]], requires_grad=True)
        >>> with metagrad.autograd.QuickDerivatives():
        ...     loss = torch.nn.functional.conv1d(x, w).square().sum()
        >>> with metagrad.autograd.linearize(loss, w) as lin:
        ...     lin.hvp(torch.ones_like(w))
        tensor([[[8., 8.]]])
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        replacement = _REPLACED.get(func)
        found = None if replacement is None else replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found
