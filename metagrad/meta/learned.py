"""Hyper-parameters that are meta-learned: parameters of a module, which an inner rule reads at each call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metagrad.optim.rules import Rule
from metagrad.optim.walk import hyperparameters_in, with_hyperparameters


@dataclass(frozen=True)
class LearnedRule:
    """A rule without the hyper-parameters that a module holds.

    A learned hyper-parameter exists once, as a parameter of the module, so that whatever exchanges that
    (``functional_call``, ``load_state_dict(assign=True)``, ``parametrize``, an assignment) reaches the rule.

    Attributes:
        template: The rule, with tensors of no memory in their places.
        names: Of the parameters of the module, in the order of ``hyperparameters_in``; None for other tensors.
    """

    template: Rule
    names: tuple[str | None, ...]

    def of(self, module: nn.Module) -> Rule:
        """Return the rule with the parameters as the module has them."""
        if not any(self.names):
            return self.template
        names = iter(self.names)

        def current(tensor: Tensor) -> Tensor:
            name = next(names)
            return tensor if name is None else getattr(module, name)

        return with_hyperparameters(self.template, current)


def register_learned(module: nn.Module, rule: Rule) -> LearnedRule:
    """Make the hyper-parameters of a rule that are :class:`torch.nn.Parameter` parameters of a module."""
    names: list[str | None] = []
    for path, tensor in hyperparameters_in(rule):
        name = f"inner_{path.replace('.', '_')}" if isinstance(tensor, nn.Parameter) else None
        while name in names and name is not None:
            name += "_"
        if name is not None:
            module.register_parameter(name, tensor)  # type: ignore[arg-type]
        names.append(name)
    kept = iter(names)

    def emptied(tensor: Tensor) -> Tensor:
        return tensor if next(kept) is None else torch.empty_like(tensor, device="meta", requires_grad=False)

    return LearnedRule(with_hyperparameters(rule, emptied) if any(names) else rule, tuple(names))
