"""Which guards torch.compile is to check before it runs compiled code.

It guards every name that it has looked up, in the library and in torch too: half of the guards of a step of MAML, and
of the time that they take where a step takes a millisecond.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Any

_LASTING = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType)
_LASTING += (type, classmethod, staticmethod, property)
_PACKAGES = ("torch", "metagrad", "builtins", "collections", "contextlib", "dataclasses", "functools")
_OF_PACKAGE = re.compile(
    rf"(dict\(|list\()*(G\['__import_({'|'.join(_PACKAGES)})(_dot_\w+)?'\]"
    rf"|__import__\('({'|'.join(_PACKAGES)})'\)|G\['__builtins_dict__\w*'\]|G\['(?!_)\w+'\])"
)
_OF_CLASS = re.compile(r"(dict\()*type\(")


def guards_of_what_changes(guards: Sequence[Any]) -> list[bool]:
    """Say which guards to keep: not those of functions, classes and modules of Python, of torch and of this library.

    Nothing changes those, nor the fields of a dataclass. Kept are the guards of flags, attributes and tensors, and
    all guards of the functions and classes of others.
    """
    return [not _is_lasting(guard.name, guard.value) for guard in guards]


def _is_lasting(name: str, value: object) -> bool:
    if "['__dataclass_fields__']" in name:
        return True
    is_default = "__defaults__" in name or "__kwdefaults__" in name
    if _OF_PACKAGE.match(name):
        return is_default or isinstance(value, _LASTING)
    if _OF_CLASS.match(name) and isinstance(value, _LASTING):
        module = getattr(value, "__module__", None) or ""
        return module.partition(".")[0] in _PACKAGES
    return False
