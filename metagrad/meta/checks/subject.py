"""What is looked at: a model, its loss, and a few examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.autograd.recompute.captured_tensors import unrecorded
from metagrad.core.capture import RandomState
from metagrad.core.modules import WatchedModules
from metagrad.core.structured import Nested, call_on, restored
from metagrad.meta.checks.calls import LOSS, Trace

MOST_EXAMPLES = 4
"""How many examples derivatives are looked at on."""


@dataclass(frozen=True)
class Subject:
    """``loss_fn(model(x), y)``.

    Attributes:
        model: The model.
        loss_fn: The loss.
        x: The inputs.
        y: The targets.
    """

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    x: Nested
    y: Nested

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss if it is a module."""
        return [part for part in (self.model, self.loss_fn) if isinstance(part, nn.Module)]

    @property
    def params(self) -> list[nn.Parameter]:
        """Those that require grad, each once."""
        found = {id(p): p for part in self.modules for p in part.parameters() if p.requires_grad}
        return list(found.values())

    def loss(self) -> Tensor:
        """Compute the loss."""
        return self.loss_fn(call_on(self.model, self.x), restored(self.y))

    def traced(self) -> tuple[Tensor, Trace]:
        """Compute the loss, and note which module recorded each node."""
        with Trace(self.model, self.loss_fn) as trace:
            prediction = call_on(self.model, self.x)
            trace.claim_for("", prediction)
            trace.inputs.setdefault(LOSS, ((prediction, restored(self.y)), {}))
            loss = self.loss_fn(prediction, restored(self.y))
            trace.claim(loss)
        self._check(loss)
        return loss, trace

    def _check(self, loss: object) -> None:
        """Refuse a loss that has no gradient."""
        call = "preflight(model, loss_fn, batch)"
        if not isinstance(loss, Tensor):
            raise TypeError(f"{call}: loss_fn must return a tensor, got {type(loss).__name__}.")
        if loss.ndim:
            raise ValueError(
                f"{call}: loss_fn must return a scalar, got shape {tuple(loss.shape)}. Reduce it, for instance by "
                "its mean."
            )
        if not loss.requires_grad:
            raise ValueError(
                f"{call}: the loss depends on no parameter that requires grad. Does the model detach its output?"
            )

    def part(self) -> Subject:
        """Return one of a few examples, where these are the first axis of single tensors."""
        x, y = self.x, self.y
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not x.ndim or not y.ndim:
            return self
        if len(x) != len(y) or len(x) <= MOST_EXAMPLES:
            return self
        return Subject(self.model, self.loss_fn, x[:MOST_EXAMPLES], y[:MOST_EXAMPLES])

    @contextlib.contextmanager
    def untouched(self) -> Generator[None]:
        """Leave buffers, attributes of modules and random generators as they were; look in grad mode."""
        with unrecorded(), torch.inference_mode(False), torch.enable_grad():
            state, generators = WatchedModules(self.modules), RandomState()
            try:
                yield
            finally:
                state.put_back()
                generators.restore()
