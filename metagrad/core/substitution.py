"""Substitution of other tensors for a module's parameters, for the duration of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence

from torch import Tensor, nn

from metagrad.core.reach import Place, placed


def replaced(model: nn.Module, values: Mapping[int, Tensor]) -> contextlib.AbstractContextManager[None]:
    """Substitute tensors for the parameters with these ids, within a ``with`` block; tied weights stay tied.

    :func:`torch.func.functional_call` does not restore the parameters of a module that occurs twice in a model
    (torch 2.13).
    """
    return placed(
        [
            (Place(module._parameters, name), values[id(param)])
            for module in model.modules()
            for name, param in module._parameters.items()
            if id(param) in values
        ]
    )


class Slots:
    """The parameters and buffers of modules as they are now, to be substituted in later calls."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._slots: list[tuple[Place, Tensor]] = [
            (Place(kept, name), tensor)
            for root in modules
            for module in root.modules()
            for kept in (module._parameters, module._buffers)
            for name, tensor in kept.items()
            if tensor is not None
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and buffers."""
        return [tensor for _, tensor in self._slots]

    def exchanged(self, exchange: Mapping[int, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Substitute other tensors for those with these ids, within a ``with`` block."""
        return placed([(place, exchange[id(t)]) for place, t in self._slots if id(t) in exchange])

    def restored(self, exchange: Mapping[int, Tensor]) -> contextlib.AbstractContextManager[None]:
        """Put all the tensors back within a ``with`` block, or the given ones for those with these ids."""
        return placed([(place, exchange.get(id(t), t)) for place, t in self._slots])


@contextlib.contextmanager
def own_buffers(modules: Iterable[nn.Module]) -> Generator[None]:
    """Let modules write to copies of their buffers."""
    before = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
    try:
        for buffers, kept in before:
            buffers.update({name: None if b is None else b.clone() for name, b in kept.items()})
        yield
    finally:
        for buffers, kept in before:
            buffers.clear()
            buffers.update(kept)
