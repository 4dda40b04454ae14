"""Taking a model apart into a chain of blocks, and checking the chain against the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metagrad.autograd.blocks.types import Block, Chain, LossFn, Params, call_with, slots_of
from metagrad.core._torch import has_hooks, named_modules, own_children, sequential_forward
from metagrad.core.capture import RandomState
from metagrad.core.modules import check_substitutable
from metagrad.core.substitution import own_buffers
from metagrad.core.tree import Tree, dissect, is_differentiable


def chain(
    model: nn.Module,
    loss_fn: LossFn,
    *,
    blocks: Sequence[Callable[[Tree], Tree]] | None = None,
    example: Tree = None,
) -> Chain:
    """Take a model apart into a chain of blocks, for derivatives that keep one block's graph at a time.

    The blocks of an ``nn.Sequential`` are its children; a nested ``nn.Sequential`` is split in its turn if one of
    its children has children. The forward of any other model is unknown, so its blocks are a conjecture: the
    modules or functions in ``blocks``, or else its children in their order (those of an ``nn.ModuleList`` one by
    one). A conjecture is compared with the model on ``example``, at random values of the parameters, where a
    connection that is zero at initialisation shows. What passes from block to block may be a tree, such as
    ``(x, mask)``.

    Args:
        model: The model. The chain reads its parameters where ``params`` does not hold others.
        loss_fn: ``loss_fn(prediction, y)``, for instance ``F.cross_entropy``.
        blocks: Modules of the model, or functions that call some.
        example: An input of the model; needed unless the model is an ``nn.Sequential`` and ``blocks`` is None.

    Returns:
        The chain, callable as ``chain(params, x, y)``.

    Raises:
        ValueError: The model is no ``nn.Sequential`` and ``example`` is missing, the model is not the composition
            of the blocks on ``example``, or there are no blocks.

    Note:
        The comparison cannot see what ``example`` does not show, such as another path for longer sequences.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> [block.name for block in metagrad.autograd.chain(model, torch.nn.functional.mse_loss).blocks]
        ['0..1', '2']
    """
    check_substitutable("chain(model, loss_fn)", model.modules())
    known = blocks is None and _is_sequential(model)
    if not known and example is None:
        raise ValueError(_unknown(model, blocks))
    names = {id(p): name for name, p in model.named_parameters()}
    if blocks is None:
        made = [_of_modules(name, modules, names) for name, modules in split(model)]
    else:
        made = [_of_callable(i, block, model, names) for i, block in enumerate(blocks)]
    if not made:
        raise ValueError(f"chain(model, loss_fn): {type(model).__name__} has no blocks.")
    result = Chain(model, tuple(made), loss_fn)
    if example is not None:
        _verify(result, example)
    return result


def _unknown(model: nn.Module, blocks: Sequence[Any] | None) -> str:
    if blocks is not None:
        return (
            "chain(model, loss_fn, blocks=...): pass an input as example= as well, on which the composition of the "
            "blocks is compared with the model."
        )
    why = "has hooks" if has_hooks(model) and isinstance(model, nn.Sequential) else "has a forward of its own"
    return (
        f"chain(model, loss_fn): {type(model).__name__} {why}, so its blocks are not known. Pass an input as "
        "example=, to compare its children, called in their order, with the model, and blocks=[...] if the order is "
        'another; or do without blocks: memory="step" in an inner loop, mode="reverse" in hvp.'
    )


def _is_sequential(module: nn.Module) -> bool:
    return (
        type(module).forward is sequential_forward
        and "forward" not in module.__dict__
        and not has_hooks(module)
    )


def split(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Name the blocks of a model that is a chain of its children, and list the modules of each."""
    groups: list[list[tuple[str, nn.Module]]] = []
    for name, module in _walk("", model, top=True):
        if groups and next(module.parameters(), None) is None:
            groups[-1].append((name, module))
        else:
            groups.append([(name, module)])
    return [
        (
            group[0][0] if len(group) == 1 else f"{group[0][0]}..{group[-1][0]}",
            [module for _, module in group],
        )
        for group in groups
    ]


def _walk(name: str, module: nn.Module, *, top: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Name the modules that are not taken apart, in the order of their parents; one may occur twice."""
    children = [(key, child) for key, child in own_children(module).items() if child is not None]
    composite = any(next(child.children(), None) is not None for _, child in children)
    if top or isinstance(module, nn.ModuleList) or (composite and _is_sequential(module)):
        for key, child in children:
            yield from _walk(f"{name}.{key}" if name else key, child)
    else:
        yield name, module


def _of_modules(name: str, modules: list[nn.Module], names: dict[int, str]) -> Block:
    slots = [slot for module in modules for slot in slots_of(module, names)]
    function = modules[0] if len(modules) == 1 else functools.partial(_in_turn, modules)
    return Block(
        name, tuple(dict.fromkeys(name for *_, name in slots)), functools.partial(call_with, function, slots)
    )


def _in_turn(modules: list[nn.Module], x: Tree) -> Tree:
    for module in modules:
        x = module(x)
    return x


def _of_callable(index: int, block: Callable[[Tree], Tree], model: nn.Module, names: dict[int, str]) -> Block:
    if isinstance(block, nn.Module):
        found = next((name for name, module in named_modules(model) if module is block), None)
        return _of_modules(found or f"blocks[{index}]", [block], names)
    call = functools.partial(call_with, block, slots_of(model, names))
    return Block(f"blocks[{index}]", tuple(names.values()), call)


def _verify(chain: Chain, example: Tree) -> None:
    model, random = chain.model, RandomState()
    names = {id(p): name for name, p in model.named_parameters()}
    params = perturbed(dict(model.named_parameters()))
    with torch.no_grad(), random.restored(), own_buffers(model.modules()):
        expected, _ = dissect(call_with(model, slots_of(model, names), params, example))
    with torch.no_grad(), random.restored(), own_buffers(model.modules()):
        try:
            got, _ = dissect(chain.predict(params, example))
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
            raise ValueError(
                f"chain(model, loss_fn): {_conjecture(chain)} cannot be called one after the other: {error}"
            ) from error
    if len(got) != len(expected) or not all(map(_agree, got, expected)):
        raise ValueError(
            f"chain(model, loss_fn): {type(model).__name__} is not the composition of {_conjecture(chain)}: on "
            "example, at random values of the parameters, they return something else. Pass the blocks that it is "
            "made of as blocks=[...]; a function may do what stands between its modules."
        )


def _conjecture(chain: Chain) -> str:
    names = [block.name for block in chain.blocks]
    shown = names if len(names) <= 6 else [*names[:3], "...", *names[-2:]]
    return f"the blocks {', '.join(shown)}"


def perturbed(params: Params, seed: int = 0) -> Params:
    """Move parameters a little at random, so that nothing is zero, or equal, by its initialisation."""
    generator = torch.Generator().manual_seed(seed)
    values: Params = {}
    for name, p in params.items():
        value = p.detach()
        if is_differentiable(value) and value.numel():
            noise = torch.randn(value.shape, generator=generator).to(value)
            value = value + 0.1 * (value.abs().mean() + 0.1) * noise
        values[name] = value
    return values


def _agree(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not is_differentiable(got):
        return torch.equal(got, expected)
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * scale)
