"""Whether modules are as they were, so that what was found out about them still holds."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_CONTENTS = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAGS = frozenset({bool, str, type(None)})
_EVERYWHERE: Any = torch.nn.modules.module


class Anatomy:
    """The trees of modules: the modules, their classes, parameters, buffers, hooks and flags, and nothing else.

    Tensors and modules are known by identity, flags (bools, strings, None) by value, other attributes by name and
    type. So what depends on another attribute of a module (a number, a list) must not be kept for an anatomy.

    Args:
        roots: The modules.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        # The containers of a module of TorchScript are no dicts.
        self._is_known = not any(isinstance(module, torch.jit.ScriptModule) for module in self.modules)
        self._attributes = [vars(module) for module in self.modules]
        if self._is_known:
            self._note_attributes()
            self._objects = self._objects_now()
            self.tensors = [found for found in self._objects if isinstance(found, Tensor)]
            self._names = self._names_now()

    def is_current(self) -> bool:
        """Say whether all of it is as it was."""
        if not self._is_known:
            return False
        # Flags and the containers of modules are held, so that nothing else can have their identity.
        if list(map(id, chain.from_iterable(map(dict.values, self._attributes)))) != self._ids:
            flags = self._flags
            self._note_attributes()
            if self._flags != flags:
                return False
        objects = self._objects_now()
        return (
            len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and self._names_now() == self._names
        )

    @property
    def is_lasting(self) -> bool:
        """Whether its tensors are what modules keep, and not what a call has put into their places."""
        return self._is_known and all(
            isinstance(t, nn.Parameter) or not t.requires_grad for t in self.tensors
        )

    def _note_attributes(self) -> None:
        """Note the values of flags, the types of other attributes, the ids of all, and the containers among them."""
        values = list(chain.from_iterable(map(dict.values, self._attributes)))
        self._flags = [value if type(value) in _FLAGS else type(value) for value in values]
        self._ids = list(map(id, values))
        self._held = [attributes[name] for attributes in self._attributes for name in _CONTENTS]
        hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]
        self._hooks = [*hooks, *(getattr(_EVERYWHERE, f"_global{name}") for name in _HOOKS)]

    def _objects_now(self) -> list[Any]:
        """Return the modules, parameters and buffers."""
        return list(chain.from_iterable(map(dict.values, self._held)))

    def _names_now(self) -> tuple[list[Any], ...]:
        """Return names, hooks, classes, and which tensors are learned."""
        return (
            list(chain.from_iterable(self._attributes)),
            list(chain.from_iterable(self._held)),
            list(chain.from_iterable(self._hooks)),
            list(map(type, self.modules)),
            [tensor.requires_grad for tensor in self.tensors],
        )
