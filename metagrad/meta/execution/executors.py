"""The executors of an algorithm, kept from call to call: what it decides for a structure it decides once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable

from torch import nn

from metagrad.meta.execution.anatomy import Anatomy
from metagrad.meta.execution.executor import TaskExecutor

_MOST = 8  # forms of a batch


class Executors:
    """The executors of a module as it is now: with these attributes, modules, parameters, hooks and flags.

    Args:
        owner: The algorithm. Objects among its attributes that can be written into must be looked at in each call.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._anatomy = Anatomy(owner.children())
        self._own = _own(owner)
        # Otherwise a call has put tensors into the places of parameters, and their graphs are not to be kept.
        self._is_lasting = self._anatomy.is_lasting and all(
            isinstance(p, nn.Parameter) for p in owner.parameters()
        )
        self._made: dict[Hashable, TaskExecutor] = {}

    def are_of(self, owner: nn.Module) -> bool:
        """Say whether nothing has changed that an executor was made of."""
        own = _own(owner)
        return (
            self._is_lasting
            and len(own) == len(self._own)
            and all(map(operator.is_, own, self._own))
            and self._anatomy.is_current()
        )

    def of(self, form: Hashable, make: Callable[[], TaskExecutor]) -> TaskExecutor:
        """Return the executor for a form of batch, made by the first call with it."""
        if form not in self._made:
            if len(self._made) == _MOST:
                self._made.clear()
            made = make()
            if not self._is_lasting:
                return made
            self._made[form] = made
        return self._made[form]


def _own(owner: nn.Module) -> list[object]:
    """Return the attributes of an algorithm, without its cache, which refers back to it."""
    attributes = vars(owner)
    learned = (p if p is None else p.requires_grad for p in owner._parameters.values())
    held = (value for name, value in attributes.items() if name != "_cache")
    return [
        type(owner),
        *held,
        *owner._parameters.values(),
        *learned,
        *owner._modules.values(),
        *owner._buffers.values(),
    ]
