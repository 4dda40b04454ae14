"""ANIL adapts only the head of a model. BOIL adapts everything except the head."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from metagrad.core._torch import named_modules
from metagrad.core.tree import LossFn
from metagrad.meta.maml import MAML
from metagrad.meta.options import refuse_fixed
from metagrad.optim.rules import Rule


class _OfHead(MAML):
    """Base class of algorithms that adapt a head, or everything except a head."""

    _chosen: ClassVar[str]
    _pattern: ClassVar[str]

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
        name = type(self).__name__
        refuse_fixed(
            name, arguments, adapt=f"{self._chosen} is adapted. Pass head=, or use MAML(..., adapt)."
        )
        adapt = self._pattern.format(_head_name(name, model, head))
        super().__init__(model, loss_fn, inner=inner, steps=steps, adapt=adapt, **arguments)


class ANIL(_OfHead):
    r"""Almost no inner loop (ANIL): only the head is adapted, and all tasks share the body.

    .. math:: \phi_{t+1} = \phi_t - \alpha \nabla_\phi L_i^{\mathrm{support}}(\theta, \phi_t)

    Here :math:`\phi` are the parameters of the head, and :math:`\theta` are the parameters of the body. The query
    loss trains both. The paper uses the same number of steps and learning rate as for MAML.

    Args:
        model: The model, as in :class:`MAML`.
        loss_fn: The loss function, as in :class:`MAML`.
        head: The module that is adapted, or its name.
        inner: The functional optimizer of the inner steps.
        steps: The number of inner steps.
        **arguments: Other arguments of :class:`MAML`, except ``adapt``.

    Raises:
        ValueError: If the model has no such module with parameters, or :class:`MAML` raises for another argument.

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

    _chosen, _pattern = "only the head", "{}.*"


class BOIL(_OfHead):
    r"""Body only update in inner loop (BOIL): only the body is adapted, and all tasks share the head.

    .. math:: \theta_{t+1} = \theta_t - \alpha \nabla_\theta L_i^{\mathrm{support}}(\theta_t, \phi)

    Here :math:`\theta` are the parameters of the body, and :math:`\phi` are the parameters of the head. The query
    loss trains both. The paper uses one inner step.

    Args:
        model: The model, as in :class:`MAML`.
        loss_fn: The loss function, as in :class:`MAML`.
        head: The module that is not adapted, or its name.
        inner: The functional optimizer of the inner steps.
        steps: The number of inner steps.
        **arguments: Other arguments of :class:`MAML`, except ``adapt``.

    Raises:
        ValueError: If the model has no such module with parameters, or :class:`MAML` raises for another argument.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> boil = metagrad.BOIL(model, torch.nn.functional.mse_loss, head="2",
        ...                      inner=metagrad.optim.rules.sgd(lr=0.1), steps=1)
        >>> list(boil.adapt((torch.zeros(4, 5, 2), torch.zeros(4, 5, 1))).params)
        ['0.weight', '0.bias']

    References:
        Oh, Yoo, Kim, Yun, "BOIL: Towards representation change for few-shot learning", ICLR 2021, section 3.
    """

    _chosen, _pattern = "all but the head", "!{}.*"


def _head_name(algorithm: str, model: nn.Module, head: str | nn.Module) -> str:
    """Return the name of the head. Raise unless it is a module of the model that has parameters."""
    named = {name: m for name, m in named_modules(model) if name and next(m.parameters(), None) is not None}
    for name, module in named.items():
        if head is module or head == name:
            return name
    shown = f"a module {type(head).__name__}" if isinstance(head, nn.Module) else repr(head)
    raise ValueError(
        f"{algorithm}(model, ..., head): expected a module of the model that has parameters, got {shown}. The "
        f"modules with parameters of {type(model).__name__} are {list(named)}."
    )
