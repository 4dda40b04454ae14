"""ANIL and BOIL: only the head of a model adapts, or all but the head."""

from __future__ import annotations

from typing import Any

from torch import nn

from metagrad.core._torch import named_modules
from metagrad.core.tree import LossFn
from metagrad.meta.maml import MAML
from metagrad.optim.rules import Rule


class ANIL(MAML):
    r"""ANIL, almost no inner loop: only the head adapts, the body is shared by all tasks.

    .. math:: \phi_{t+1} = \phi_t - \alpha \nabla_\phi L_i^{\mathrm{support}}(\theta, \phi_t)

    with :math:`\phi` the parameters of the head and :math:`\theta` those of the body. Both are learned by the loss of
    the query examples. The paper takes the steps and the step size of MAML.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        head: The name of the module that adapts, or the module.
        inner: As of :class:`MAML`.
        steps: The number of inner steps.
        **arguments: As of :class:`MAML`.

    Raises:
        ValueError: The model has no such module, or :class:`MAML` refuses the other arguments.

    Example:
        >>> model = metagrad.models.Conv4(ways=5)
        >>> anil = metagrad.ANIL(model, torch.nn.functional.cross_entropy,
        ...                      inner=metagrad.optim.rules.sgd(lr=0.1), steps=5)
        >>> task = (torch.rand(2, 5, 1, 28, 28), torch.arange(5).expand(2, 5))
        >>> {name: tuple(p.shape) for name, p in anil.adapt(task).params.items()}
        {'head.weight': (2, 5, 64), 'head.bias': (2, 5)}

    References:
        Raghu, Raghu, Bengio, Vinyals, "Rapid learning or feature reuse? Towards understanding the effectiveness of
        MAML", ICLR 2020, section 4.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        head: str | nn.Module = "head",
        inner: Rule,
        steps: int,
        **arguments: Any,
    ) -> None:
        adapt = f"{_head_name('ANIL', model, head)}.*"
        super().__init__(model, loss_fn, inner=inner, steps=steps, adapt=adapt, **arguments)


class BOIL(MAML):
    r"""BOIL, body only update in inner loop: all but the head adapts, the head is shared by all tasks.

    .. math:: \theta_{t+1} = \theta_t - \alpha \nabla_\theta L_i^{\mathrm{support}}(\theta_t, \phi)

    with :math:`\theta` the parameters of the body and :math:`\phi` those of the head. Both are learned by the loss of
    the query examples. The paper takes one inner step.

    Args:
        model: As of :class:`MAML`.
        loss_fn: As of :class:`MAML`.
        head: The name of the module that does not adapt, or the module.
        inner: As of :class:`MAML`.
        steps: The number of inner steps.
        **arguments: As of :class:`MAML`.

    Raises:
        ValueError: The model has no such module, or :class:`MAML` refuses the other arguments.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> boil = metagrad.BOIL(model, torch.nn.functional.mse_loss, head="2",
        ...                      inner=metagrad.optim.rules.sgd(lr=0.1), steps=1)
        >>> list(boil.adapt((torch.zeros(4, 5, 2), torch.zeros(4, 5, 1))).params)
        ['0.weight', '0.bias']

    References:
        Oh, Yoo, Kim, Yun, "BOIL: Towards representation change for few-shot learning", ICLR 2021, section 3.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        *,
        head: str | nn.Module = "head",
        inner: Rule,
        steps: int,
        **arguments: Any,
    ) -> None:
        adapt = f"!{_head_name('BOIL', model, head)}.*"
        super().__init__(model, loss_fn, inner=inner, steps=steps, adapt=adapt, **arguments)


def _head_name(algorithm: str, model: nn.Module, head: str | nn.Module) -> str:
    """Return the name of the head; refuse what is no module of the model with parameters."""
    named = {name: m for name, m in named_modules(model) if name and next(m.parameters(), None) is not None}
    for name, module in named.items():
        if head is module or head == name:
            return name
    shown = f"a module {type(head).__name__}" if isinstance(head, nn.Module) else repr(head)
    raise ValueError(
        f"{algorithm}(model, ..., head): expected a module of the model that has parameters, got {shown}. Those of "
        f"{type(model).__name__} are {list(named)}."
    )
