"""A model as a chain of blocks, each a function of its own parameters and of what the block before it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor, nn

from metagrad.core._torch import own_parameters
from metagrad.core.substitution import put
from metagrad.core.tree import Tree

T = TypeVar("T")

Params: TypeAlias = dict[str, Tensor]
"""Parameters by name, as ``dict(model.named_parameters())`` gives them."""

LossFn: TypeAlias = Callable[[Tree, Tree], Tensor]


@dataclass(frozen=True)
class Block:
    """One block: a function of its own parameters, by name, and of what the block before it returns.

    Attributes:
        name: How errors name it.
        parameters: Names of the parameters it may read.
        call: ``call(params, x)``, where ``params`` holds those of ``parameters`` that are exchanged; it reads the
            others where they are.

    Example:
        >>> block = metagrad.autograd.Block("scale", ("a",), lambda params, x: params["a"] * x)
        >>> block.call({"a": torch.tensor(2.0)}, torch.tensor(3.0))
        tensor(6.)
    """

    name: str
    parameters: tuple[str, ...]
    call: Callable[[Params, Tree], Tree]

    def own(self, values: Mapping[str, T]) -> dict[str, T]:
        """Choose what belongs to the parameters of this block."""
        return {name: values[name] for name in self.parameters if name in values}


@dataclass(frozen=True)
class Chain:
    r"""A model that is a chain of blocks, and its loss, as a function of its parameters.

    .. math:: L(\theta, x, y) = \ell(f_L(\theta_L, \dots f_1(\theta_1, x)), y)

    :func:`metagrad.autograd.chain` makes one of a module.

    Attributes:
        model: Whose parameters ``params`` stand for.
        blocks: In the order in which they run.
        loss_fn: ``loss_fn(prediction, y)``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        >>> loss = metagrad.autograd.chain(model, torch.nn.functional.mse_loss)
        >>> loss({"0.weight": torch.tensor([[3.0]])}, torch.tensor([[2.0]]), torch.tensor([[1.0]]))
        tensor(25.)
    """

    model: nn.Module
    blocks: tuple[Block, ...]
    loss_fn: LossFn

    def __call__(self, params: Params, x: Tree, y: Tree) -> Tensor:
        """Return the loss; parameters that ``params`` does not hold are the model's own."""
        return self.loss_fn(self.predict(params, x), y)

    def predict(self, params: Params, x: Tree) -> Tree:
        """Return what the last block returns."""
        for block in self.blocks:
            x = block.call(block.own(params), x)
        return x


Slots: TypeAlias = list[tuple[dict[str, "nn.Parameter | None"], str, str]]
"""Where a parameter is kept, under which key, and its name in the model."""


def slots_of(module: nn.Module, names: dict[int, str]) -> Slots:
    """Find the parameters below a module whose ids have names; one that is tied has several places."""
    return [
        (own_parameters(inner), key, names[id(p)])
        for inner in module.modules()
        for key, p in own_parameters(inner).items()
        if p is not None and id(p) in names
    ]


def call_with(function: Callable[[Tree], Tree], slots: Slots, params: Params, x: Tree) -> Tree:
    """Call a function with other values for some parameters, also where an outer call has replaced these already."""
    with put([(kept, key, params[name]) for kept, key, name in slots if name in params]):
        return function(x)
