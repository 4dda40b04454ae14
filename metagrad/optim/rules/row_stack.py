"""A sliding window of rows as one tensor."""

from __future__ import annotations

from torch import Tensor

_SPARE = 8


class RowStack:
    """Stacks rows, and copies only the last of them where a window has slid on by one.

    The rows of the last window lie in a buffer with room at its end, where the next row is written. Nothing that was
    written is ever written again, so that windows that were given out stay as they are.

    Attributes:
        rows: Those of the last window, as parts of the buffer: who keeps these keeps no second copy.

    Example:
        >>> import torch
        >>> from metagrad.optim.rules.row_stack import RowStack
        >>> stack = RowStack()
        >>> window = stack((torch.tensor([[1.0]]), torch.tensor([[2.0]])))
        >>> stack((*stack.rows[1:], torch.tensor([[3.0]])))
        tensor([[[2.],
                 [3.]]])
    """

    def __init__(self) -> None:
        self.rows: tuple[Tensor, ...] = ()
        self._buffer: Tensor | None = None
        self._end = 0

    def __call__(self, rows: tuple[Tensor, ...]) -> Tensor:
        """Return rows ``[tasks, n]`` as a tensor ``[tasks, k, n]``."""
        size = len(rows)
        if self._buffer is None or not self._continues(rows):
            self._buffer = _with_room(rows)
            self._end = size
            self.rows = self._buffer[:, :size].unbind(1)
        elif rows[-1] is not self.rows[-1]:
            self._buffer[:, self._end] = rows[-1]
            self._end += 1
            self.rows = (*rows[:-1], self._buffer[:, self._end - 1])
        return self._buffer[:, self._end - size : self._end]

    def _continues(self, rows: tuple[Tensor, ...]) -> bool:
        """Say whether these rows are those of the last window, or all but the last are its end, and that has room."""
        is_same = len(rows) == len(self.rows) and all(a is b for a, b in zip(rows, self.rows, strict=True))
        before = rows[:-1]
        has_room = self._buffer is not None and self._end < self._buffer.shape[1]
        return is_same or (
            has_room
            and 0 < len(before) <= len(self.rows)
            and all(a is b for a, b in zip(reversed(before), reversed(self.rows), strict=False))
        )


def _with_room(rows: tuple[Tensor, ...]) -> Tensor:
    """Put rows into a new buffer that is half as long again."""
    tasks, n = rows[0].shape
    buffer = rows[0].new_empty(tasks, len(rows) + len(rows) // 2 + _SPARE, n)
    for index, row in enumerate(rows):
        buffer[:, index] = row
    return buffer
