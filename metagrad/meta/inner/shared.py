"""Parameters that are learned, but shared by all tasks, as arguments of compiled code, which reads no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from metagrad.core._torch import named_modules
from metagrad.core.substitution import put
from metagrad.meta.objective.task_loss import TaskLoss
from metagrad.optim.rules import Params


def shared_slots(objective: TaskLoss, adapted: Collection[str]) -> list[tuple[str, dict[str, Any], str]]:
    """Return where the parameters of the model and the loss are that require grad and do not adapt.

    Each has all of its names, with the dict that it is in and the key there.

    Args:
        objective: The loss.
        adapted: The names of the parameters that adapt.
    """
    own = {id(p) for name, p in objective.model.named_parameters() if name in adapted}
    return [
        (f"{root}.{path}.{key}" if path else f"{root}.{key}", module._parameters, key)
        for root, top in _roots(objective)
        for path, module in top.named_modules(remove_duplicate=False)
        for key, p in module._parameters.items()
        if p is not None and p.requires_grad and id(p) not in own
    ]


def placed(objective: TaskLoss, values: Params) -> contextlib.AbstractContextManager[None]:
    """Put values into the places of parameters, which are known by their names."""
    if not values:
        return contextlib.nullcontext()
    slots = []  # by a loop, since torch.compile cannot trace a comprehension that assigns
    for root, top in _roots(objective):
        for path, module in named_modules(top):
            for key in module._parameters:
                name = f"{root}.{path}.{key}" if path else f"{root}.{key}"
                if name in values:
                    # A view has no identity that torch.compile would guard, as the tensor has that is handed over.
                    slots.append((module._parameters, key, values[name].view_as(values[name])))
    return put(slots)


class SharingCall(NamedTuple):
    """A function that reads shared parameters, with these as its first argument; guards match it by value."""

    objective: TaskLoss
    function: Callable[..., Any]

    def __call__(self, shared: Params, *args: Any) -> Any:
        """Call the function."""
        with placed(self.objective, shared):
            return self.function(*args)


def _roots(objective: TaskLoss) -> list[tuple[str, nn.Module]]:
    pairs = (("model", objective.model), ("loss_fn", objective.loss_fn))
    return [(name, module) for name, module in pairs if isinstance(module, nn.Module)]
