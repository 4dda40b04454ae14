"""What a computation takes from its surroundings: random numbers and autocast, to be set up again later."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor


class RandomState:
    """The state of torch's global random generators, kept only if a call draws from them."""

    def __init__(self) -> None:
        self.cpu: Tensor | None = torch.get_rng_state()
        self.cuda: dict[int, Tensor] = {}
        if torch.cuda.is_initialized():
            self.cuda = {i: torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}

    def close(self) -> None:
        """Forget the states that the call left as they were."""
        if self.cpu is not None and torch.equal(self.cpu, torch.get_rng_state()):
            self.cpu = None
        self.cuda = {i: s for i, s in self.cuda.items() if not torch.equal(s, torch.cuda.get_rng_state(i))}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw again what the recorded call drew, and leave the generators untouched."""
        if self.cpu is None and not self.cuda:
            yield
            return
        with torch.random.fork_rng(devices=list(self.cuda)):
            self.restore()
            yield

    def restore(self) -> None:
        """Set the generators back."""
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)


class AutocastState:
    """The autocast state of every device type in use."""

    def __init__(self) -> None:
        kinds = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
        self.kinds = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        }

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Cast as the recorded call did; without a cache, whose entries would outlive the recomputation."""
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.kinds.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """Keep torch's word about itself to itself: it builds decompositions with torch.jit, on their first use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated", DeprecationWarning)
        yield
