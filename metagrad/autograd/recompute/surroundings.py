"""What a function finds around it: modules, tensors that it reads, flags of torch.

Where a function is not recorded, as one that is compiled, its derivatives may be computed from the start once these
have changed: by ``eval()``, a schedule, a buffer that another tensor has replaced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from metagrad.autograd.recompute.captured_tensors import Constant, refuse_modified
from metagrad.core.capture import AutocastState, Flags, restored
from metagrad.core.modules import ModuleState, modules_of


class Surroundings:
    """What was around a function when it was called; all buffers count, until it is known which ones it reads.

    They are restored where they have changed.

    Args:
        call: How errors name the call.
        reader: What they call the function.
        modules: Which modules it can reach.
    """

    def __init__(self, call: str, reader: str, modules: list[nn.Module]) -> None:
        self.call, self.reader = call, reader
        self.autocast, self.flags, self.modules = AutocastState(), Flags(), ModuleState(modules)
        self.note_read(self.modules.buffers())

    def note_read(self, tensors: Iterable[Tensor]) -> None:
        """Note, after a call, which tensors the function reads: to write into them is an error from here on."""
        self.modules.settle()
        self.constants = [Constant.of(tensor) for tensor in tensors]

    def forget_written(self) -> None:
        """Leave out the tensors that were written into so far: the function itself writes them."""
        self.modules.settle()
        self.constants = [constant for constant in self.constants if constant.is_as_read()]

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Set up autocast, flags and modules as they were, within a ``with`` block.

        Raises:
            RuntimeError: A tensor that is read was written into since.
        """
        refuse_modified(self.call, self.reader, self.constants)
        # Guards of compiled code would look at modules that are written into.
        changed = [] if self.modules.is_as_now() else [self.modules]
        with restored(self.autocast, self.flags, *changed):
            yield


class _Known(NamedTuple):
    """The modules that a function can reach, and the tensors that it reads, None if those are not known yet."""

    modules: list[weakref.ref[nn.Module]]
    read: list[Tensor] | None


class Reached:
    """What functions can reach, found once and kept for the lifetime of their owners."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[object, _Known] = weakref.WeakKeyDictionary()

    def note(self, owner: object, function: Callable[..., Any], read: list[Tensor] | None = None) -> None:
        """Note which modules the function of an owner can reach, and which tensors it reads."""
        self._known[owner] = _Known([weakref.ref(module) for module in modules_of(function)], read)

    def modules(self, owner: object, function: Callable[..., Any]) -> list[nn.Module]:
        """Return the modules that the function of an owner can reach."""
        if owner not in self._known:
            self.note(owner, function)
        return [module for reference in self._known[owner].modules if (module := reference()) is not None]

    def read(self, owner: object) -> list[Tensor] | None:
        """Return the tensors that the function of an owner reads and that are no arguments; None if not known."""
        return self._known[owner].read if owner in self._known else None
