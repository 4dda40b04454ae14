"""Which module is running, and what it made: the owners of the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from metagrad.core import _torch
from metagrad.core._torch import named_modules
from metagrad.core.capture import RandomState
from metagrad.core.structured import structured
from metagrad.core.tape import graph_nodes
from metagrad.core.tree import tensors_in, tree_leaves

if TYPE_CHECKING:
    from typing_extensions import Self

LOSS = "loss_fn(...)"
"""The path of the loss function."""


def is_below(path: str, ancestor: str) -> bool:
    """Say whether a module is part of another; the path of the model is empty, and the loss is no part of it."""
    return not path.startswith(LOSS) if not ancestor else path.startswith(f"{ancestor}.")


def paths_of(model: nn.Module, loss_fn: Callable[..., Any]) -> dict[nn.Module, str]:
    """Name the modules of a model, and those of its loss."""
    found: dict[nn.Module, str] = {}
    for root, prefix in ((model, ""), (loss_fn, LOSS)):
        for name, module in named_modules(root) if isinstance(root, nn.Module) else ():
            found.setdefault(module, ".".join(filter(None, (prefix, name))))
    return found


class CallStack:
    """Knows which modules are running: a context that hooks into them.

    Args:
        model: The model.
        loss_fn: The loss; where no module runs, it does.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self.paths: dict[nn.Module, str] = paths_of(model, loss_fn)
        self.running: list[str] = []
        self._handles: list[Any] = []

    @property
    def innermost(self) -> str:
        """The module that is running."""
        return self.running[-1] if self.running else LOSS

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module is called."""
        self.running.append(self.paths[module])

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Note that it returns; one that raises stays."""
        self.running.pop()

    def __enter__(self) -> Self:
        """Hook into the modules."""
        for module in self.paths:
            self._handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self.leave, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


class Trace(CallStack):
    """Knows of one call what each module made.

    A node belongs to the innermost module that ran when it was made: what the arguments of a module depend on was
    made before it, and what else its result depends on was made by it.

    Attributes:
        owners: The path of the module that made a node.
        inputs: The arguments of the first call of each module, by its path; of calls inside torch.vmap none.
        drawn: The paths of the modules that drew random numbers.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__(model, loss_fn)
        self.owners: dict[Node, str] = {}
        self.inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.drawn: dict[str, None] = {}
        self._visited: set[Node] = set()
        self._generators: list[RandomState] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a module is called on."""
        self.claim((args, kwargs))
        super().enter(module, args, kwargs)
        if not any(map(_torch.is_batched, tensors_of((args, kwargs)))):
            self.inputs.setdefault(self.innermost, (args, kwargs))
        self._generators.append(RandomState())

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Note what it made."""
        self.claim(result)
        path = self.innermost
        if self._generators.pop().moved() and not any(is_below(other, path) for other in self.drawn):
            self.drawn[path] = None
        super().leave(module, args, kwargs, result)

    def claim(self, value: object) -> None:
        """Say that what is new behind tensors was made by the module that is running."""
        self.claim_for(self.innermost, value)

    def claim_for(self, path: str, value: object) -> None:
        """Say that it was made by a module."""
        with _torch.without_torch_function():
            for node in graph_nodes(map(_below_vmap, tensors_of(value)), self._visited):
                self.owners[node] = path

    def nodes(self) -> dict[str, list[Node]]:
        """Return the nodes that each module made."""
        found: dict[str, list[Node]] = {}
        for node, path in self.owners.items():
            found.setdefault(path, []).append(node)
        return found


def tensors_of(value: object) -> list[Tensor]:
    """Return the tensors in arguments or results; of unknown objects, those in lists, tuples and dicts."""
    try:
        return tree_leaves(structured(value, "preflight"))
    except TypeError:
        return tensors_in(value)


def _below_vmap(tensor: Tensor) -> Tensor:
    """Return what torch.vmap wraps, which is on the tape."""
    while _torch.is_batched(tensor):
        tensor = _torch.get_unwrapped(tensor)
    return tensor
