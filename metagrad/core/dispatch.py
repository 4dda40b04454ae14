"""The function mode of the library, which replaces torch functions by handlers from a table."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from metagrad.core import _torch


class _Active(threading.local):
    """The active modes of this thread, outermost first."""

    def __init__(self) -> None:
        self.modes: list[Dispatch] = []


_active = _Active()


class Dispatch(TorchFunctionMode):
    """Context manager that replaces torch functions by handlers.

    A recomputation enters the modes that were active in the original call. Functions without a handler go through
    :meth:`called`, which subclasses may override.

    Args:
        table: The handler of each function. A handler takes the same arguments as its function.

    Attributes:
        has_handled: True once a function was replaced.
    """

    def __init__(self, table: Mapping[Callable[..., Any], Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.table = {} if table is None else table
        self.has_handled: bool = False
        self._depth = 0

    def called(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that has no handler."""
        return function(*args, **kwargs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = self.table.get(func)
        self.has_handled = self.has_handled or handler is not None
        self._depth += 1
        try:
            return (
                self.called(func, args, kwargs or {}) if handler is None else handler(*args, **(kwargs or {}))
            )
        finally:
            self._depth -= 1

    def __enter__(self) -> Any:
        _active.modes.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _active.modes.remove(self)


class DispatchState:
    """Snapshot of the active modes and of ``__torch_function__`` for subclasses, which can be restored later."""

    def __init__(self) -> None:
        self.modes = list(_active.modes)
        self.has_subclasses: bool = _torch.has_torch_function_of_subclasses()

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Context manager that enters the recorded modes that are not active.

        While a mode handles ``torch.autograd.grad``, torch removes the mode from its stack. In the same way, torch
        disables a subclass while the subclass handles a function.
        """
        with contextlib.ExitStack() as stack:
            if self.has_subclasses and not _torch.has_torch_function_of_subclasses():
                stack.enter_context(_torch.with_torch_function())
            for mode in self.modes:
                if mode not in _active.modes or mode._depth:
                    stack.enter_context(mode)
            yield
