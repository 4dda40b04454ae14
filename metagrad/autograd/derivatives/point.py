"""Where something was computed: the parameters and data that later products read again."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping

from torch import Tensor

from metagrad.core.modules import has_memory, refuse_freed
from metagrad.core.tree import Tree, tensors_in


class Point:
    """Tensors that are read again, and the state they were in.

    Products that read other numbers would be of another point than the loss, the gradient and what else was kept.

    Args:
        call: How errors name the caller.
        params: Parameters by name, or their coordinates.
        data: A tree of other tensors.
        buffers: Of modules; functions that are evaluated again may write into these, as to count.
    """

    def __init__(
        self, call: str, params: Mapping[str, Tensor], data: Tree = (), buffers: Iterable[Tensor] = ()
    ) -> None:
        self.call = call
        self._params = params
        named = [(f"the parameter {name}", tensor) for name, tensor in params.items()]
        named += [("a tensor of the data", tensor) for tensor in tensors_in(data)]
        named += [("a buffer of a module", tensor) for tensor in buffers]
        self._named = [(what, tensor) for what, tensor in named if has_memory(tensor)]
        self._note()

    def _note(self) -> None:
        self._seen = [(what, tensor, tensor._version, _memory(tensor)) for what, tensor in self._named]

    @contextlib.contextmanager
    def read_again(self) -> Generator[None]:
        """Evaluate a function of the tensors once more, within a ``with`` block.

        Raises:
            ValueError: One of the tensors was written in place, or has other memory; with its name.
        """
        for what, tensor, version, _ in self._seen:
            if tensor._version != version:
                raise self._error(what)
        self.refuse_moved()
        yield
        self._note()

    def refuse_moved(self) -> None:
        """Raise if one of the tensors has other memory; of writes in place torch knows whether a graph reads them.

        A graph may hold a leaf itself, and reads what is put into it by ``leaf.data = values``.

        Raises:
            ValueError: With its name.
        """
        for what, tensor, _, memory in self._seen:
            if _memory(tensor) != memory:
                refuse_freed(self.call, self._params)
                raise self._error(what)

    def _error(self, what: str) -> ValueError:
        return ValueError(
            f"{self.call}: {what} was written since the gradient was computed, and products would mix two points. "
            "Compute it anew after each step of an optimizer, and after torch.nn.utils.vector_to_parameters; or of "
            "copies of the parameters, p.detach().clone()."
        )


def _memory(tensor: Tensor) -> int:
    return tensor.data_ptr()
