"""Sharpness along the updates of a training loop, from forward passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from metagrad.core.capture import RandomState
from metagrad.core.checks import check_count, check_function, check_type
from metagrad.core.dispatch import Dispatch
from metagrad.core.norms import every_order
from metagrad.core.reach import ReachableObjects
from metagrad.core.substitution import exchanged, own_buffers
from metagrad.core.tree import HALF
from metagrad.curvature.operators.hessian import hessian

_CALL = "Sharpness(optimizer, loss)"
_ROUNDING = 10  # differences of losses below this multiple of their rounding error are noise
_DOUBLINGS, _HALVINGS = 20, 12


@dataclass(frozen=True)
class Reading:
    r"""The curvature along one update :math:`d`, at the parameters before it.

    Attributes:
        step: Number of the step, from 1.
        loss: The loss.
        slope: :math:`g^\top d`, the derivative of the loss along the update.
        curvature: :math:`d^\top H d / d^\top d`. NaN if it is below the rounding error.
        ratio: :math:`-2 g^\top d / d^\top H d`, the multiple of the update at which a quadratic loss is as high as
            before. Below 1, the update increases a quadratic loss. Infinite if the curvature is not positive.
        critical: The multiple of the update at which the loss is as high as before, by search. None if not
            requested, infinite if the loss stays lower for up to a million updates. A loss of NaN counts as higher.
        rounding: Bound of the rounding error of ``curvature``.
        top: The largest eigenvalue of the Hessian. None if not requested.
        trace: The trace of the Hessian. None if not requested.
        seconds: Duration of the reading, in seconds.
    """

    step: int
    loss: float
    slope: float
    curvature: float
    ratio: float
    critical: float | None
    rounding: float
    top: float | None
    trace: float | None
    seconds: float


class Sharpness:
    r"""Watch the curvature along the updates of any optimizer, while a training loop runs unchanged.

    .. math:: d^\top H d \approx L(w + d) + L(w - d) - 2 L(w), \qquad
              g^\top d \approx \frac{L(w + d) - L(w - d)}{2}

    for an update :math:`d` of parameters :math:`w`. A reading costs three forward passes and two copies of
    the parameters. It needs no second derivatives, so it works with fused attention. Parameters, buffers and
    random numbers are bitwise identical to a run without the watch. All evaluations draw the same random
    numbers. A step that changes no parameter, such as a step that a GradScaler skips, has no reading.

    Parameters in half precision have steps below the rounding error. Their curvature is NaN. Under autocast, the
    rounding error is taken to average out over the last tensor in half precision, such as the logits.

    Args:
        optimizer: The optimizer. Two hooks stay on it until :meth:`close`.
        loss: Called without arguments. It returns the loss of the current batch or of a fixed batch, without a
            backward pass.
        every: Number of steps from one reading to the next. The first step has a reading.
        critical: Search for the critical step, by about 5 to 15 more forward passes.
        top: Compute the largest eigenvalue of the Hessian, by Hessian-vector products.
        trace: Estimate the trace of the Hessian.

    Attributes:
        history: All readings.

    Raises:
        TypeError: ``optimizer`` is no optimizer, or ``loss`` is not callable.
        ValueError: ``every`` is not a positive number. In a step, the loss has more than one element.

    Example:
        >>> w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        >>> opt = torch.optim.SGD([w], lr=0.1)
        >>> def loss(): return 2 * w[0] ** 2 + w[1] ** 2 / 2
        >>> with metagrad.curvature.Sharpness(opt, loss, every=1) as watch:
        ...     for _ in range(3):
        ...         opt.zero_grad()
        ...         loss().backward()
        ...         opt.step()
        >>> round(watch.last.curvature, 4), round(watch.last.ratio, 4), watch.last.step
        (2.3241, 8.6053, 3)

    References:
        Kalra et al., "A scalable measure of loss landscape curvature for analyzing the training dynamics of LLMs",
        arXiv:2601.16979, 2026, for the critical step; Cohen et al., "Gradient descent on neural networks typically
        occurs at the edge of stability", ICLR 2021.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        loss: Callable[[], Tensor],
        *,
        every: int = 100,
        critical: bool = False,
        top: bool = False,
        trace: bool = False,
    ) -> None:
        check_type(f"{_CALL}: optimizer", optimizer, Optimizer)
        check_function(_CALL, "loss", loss)
        check_count(f"{_CALL}, every", every)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside the wrapper of accelerate
        self.history: list[Reading] = []
        self._optimizer, self._loss, self._every = optimizer, loss, every
        self._critical, self._top, self._trace = critical, top, trace
        self._steps, self._before = 0, dict[Tensor, Tensor]()
        self._modules = ReachableObjects(loss).modules
        self._handles = [
            optimizer.register_step_pre_hook(self._copy),
            optimizer.register_step_post_hook(self._read),
        ]

    def __repr__(self) -> str:
        return f"Sharpness(every {self._every} steps, {len(self.history)} readings, last={self.history[-1:]})"

    @property
    def last(self) -> Reading:
        """The last reading. Raises ``IndexError`` if there is no reading yet."""
        return self.history[-1]

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Sharpness:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _copy(self, *_: Any) -> None:
        self._before = {}
        if self._steps % self._every == 0:
            params = [p for group in self._optimizer.param_groups for p in group["params"]]
            self._before = {p: p.detach().clone() for p in params}
        self._steps += 1

    def _read(self, *_: Any) -> None:
        before, self._before = self._before, {}
        update = {p: p.detach() - old for p, old in before.items()}
        squared = sum(float(d.double().square().sum()) for d in update.values())
        if squared > 0:
            with own_buffers(self._modules):
                self.history.append(self._reading(before, update, squared))

    def _reading(
        self, before: Mapping[Tensor, Tensor], update: Mapping[Tensor, Tensor], squared: float
    ) -> Reading:
        began, random = time.perf_counter(), RandomState()

        def at(length: float) -> Tensor:
            moved = {p: old + length * update[p] if length else old for p, old in before.items()}
            with torch.no_grad(), exchanged(moved), random.restored():
                return _checked(self._loss())

        with _HalfPrecision() as half:
            here = at(0.0)
        after, behind = at(1.0), at(-1.0)
        eps = max(half.eps, *(torch.finfo(tensor.dtype).eps for tensor in (here, *before)))
        rounding = _ROUNDING * eps * abs(float(here))
        value, slope = float(here), (float(after) - float(behind)) / 2
        curved = float(after) + float(behind) - 2 * value
        curved = curved if abs(curved) > rounding else math.nan
        ratio = -2 * slope / curved if curved > 0 else math.nan if math.isnan(curved) else math.inf
        critical = None
        if self._critical:
            critical = _searched(lambda length: not float(at(length)) <= value)  # NaN climbs
        top, trace = self._of_hessian(before, random) if self._top or self._trace else (None, None)
        return Reading(
            step=self._steps,
            loss=value,
            slope=slope,
            curvature=curved / squared,
            ratio=ratio,
            critical=critical,
            rounding=rounding / squared,
            top=top,
            trace=trace,
            seconds=time.perf_counter() - began,
        )

    def _of_hessian(
        self, before: Mapping[Tensor, Tensor], random: RandomState
    ) -> tuple[float | None, float | None]:
        """Return the largest eigenvalue and the trace, if they were requested."""
        params = {f"parameter {i}": p for i, p in enumerate(before) if p.requires_grad}
        generator = torch.Generator(next(iter(before)).device).manual_seed(0)
        with torch.enable_grad(), exchanged(before), random.restored():
            with every_order():
                loss = _checked(self._loss())
            with hessian(loss, params) as H:
                top = float(H.eigenvalues(1, generator=generator).values[0]) if self._top else None
                trace = float(H.trace(generator=generator).value) if self._trace else None
        return top, trace


class _HalfPrecision(Dispatch):
    """Notes the precision of the last tensor in half precision, as the logits under autocast.

    Attributes:
        eps: Its relative rounding error, averaged over its elements. 0 without half precision.
    """

    eps = 0.0

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().called(function, args, kwargs)
        if isinstance(result, Tensor) and result.dtype in HALF:
            self.eps = torch.finfo(result.dtype).eps / max(result.numel(), 1) ** 0.5
        return result


def _checked(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(f"{_CALL}: loss must return one element, got shape {list(loss.shape)}.")
    return loss.reshape(())


def _searched(climbs: Callable[[float], bool]) -> float:
    """Search the length at which a loss is as high as at length 0, by doubling or halving 1 and then by bisection."""
    low, high = 0.0, 1.0
    if climbs(1.0):
        while high > 2.0**-_DOUBLINGS and climbs(high / 2):
            high /= 2
        low = high / 2
    else:
        while high < 2.0**_DOUBLINGS and not climbs(high):
            low, high = high, 2 * high
        if high >= 2.0**_DOUBLINGS:
            return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if climbs(middle) else (middle, high)
    return (low + high) / 2
