"""The library's one function mode: functions of torch are replaced by handlers, from a table."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from metagrad.core import _torch


class _Active(threading.local):
    """The modes whose ``with`` blocks this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.modes: list[Dispatch] = []


_active = _Active()


class Dispatch(TorchFunctionMode):
    """Call handlers in place of functions of torch, within a ``with`` block.

    A recomputation runs in the modes that its call ran in. Subclasses may override :meth:`called`, which every
    function without a handler goes through.

    Args:
        table: Handlers, called with the arguments of the function that they replace.
    """

    def __init__(self, table: Mapping[Callable[..., Any], Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.table = {} if table is None else table
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
    """The modes that are active now, and whether tensor subclasses take part, to be so again later."""

    def __init__(self) -> None:
        self.modes = list(_active.modes)
        self.has_subclasses: bool = _torch.has_torch_function_of_subclasses()

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Enter the modes that are not active, within a ``with`` block.

        Torch takes a mode off its stack while the mode handles ``torch.autograd.grad``, and subclasses likewise.
        """
        with contextlib.ExitStack() as stack:
            if self.has_subclasses and not _torch.has_torch_function_of_subclasses():
                stack.enter_context(_torch.with_torch_function())
            for mode in self.modes:
                if mode not in _active.modes or mode._depth:
                    stack.enter_context(mode)
            yield
