"""What is compiled of a loop: a step, its vector-Jacobian product, or all steps.

What changes from step to step or from call to call is a tensor: the state, the number of the step, the arguments. So
what was compiled once serves any number of steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metagrad.autograd.compile.compiled import Compiled, CompileOptions, laid_out, pass_gate
from metagrad.autograd.compile.fallback import Fallback
from metagrad.autograd.recompute.modules import modules_of
from metagrad.autograd.unrolling.schedule import Step
from metagrad.autograd.unrolling.steps import checked_pair
from metagrad.core.tree import HOLE, Structure, Tree, tree_flatten, tree_leaves


class Layout(NamedTuple):
    """Where the tensors of a state and of the arguments stand in their trees."""

    state: Structure
    args: Structure


class Versions(NamedTuple):
    """Tensors that will be read again, and what version of them was read."""

    tensors: list[Tensor]
    numbers: list[int]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> Versions:
        """Note the versions of tensors; inference tensors, which nobody writes into, have none."""
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        return cls(counted, [tensor._version for tensor in counted])

    def check(self, call: str) -> None:
        """Raise if one was modified since."""
        for tensor, number in zip(self.tensors, self.numbers, strict=True):
            if tensor._version != number:
                raise RuntimeError(
                    f"{call}: a tensor of shape {tuple(tensor.shape)} that the step reads was modified in place "
                    "between the forward pass and its recomputation. Modify a copy, or pass it as an argument."
                )


class Kernels(Fallback):
    """The compiled step and step-VJP of a loop; kept, they serve loops of the same step.

    Args:
        call: How warnings and errors name the loop.
        options: What is compiled, and how.
    """

    def __init__(self, call: str, options: CompileOptions) -> None:
        super().__init__(call)
        self.options = options
        self.advance = Compiled(_advance, options.options)
        self.pull = Compiled(_pull, options.options)
        self.whole = Compiled(_whole, options.options)
        self._read: weakref.WeakKeyDictionary[object, list[Tensor]] = weakref.WeakKeyDictionary()
        self._modules: weakref.WeakKeyDictionary[object, list[weakref.ref]] = weakref.WeakKeyDictionary()

    def note(self, owner: object, read: list[Tensor]) -> None:
        """Remember, as long as a step's owner lives, what the step reads without being handed it."""
        self._read[owner] = read
        self._modules.pop(owner, None)

    def modules(self, owner: object, step: Step) -> list[nn.Module]:
        """Return the modules that a step can reach, which are looked for when it is compiled."""
        if owner not in self._modules:
            self._modules[owner] = [weakref.ref(module) for module in modules_of(step)]
        return [module for reference in self._modules[owner] if (module := reference()) is not None]

    def versions(self, owner: object, find: Callable[[], object]) -> Versions:
        """Return what a step reads without being handed it; ``find`` leads to :meth:`note` if that is not known."""
        if owner not in self._read:
            find()
        return Versions.of(self._read[owner])


def flat_step(
    step: Step, layout: Layout, state: Sequence[Tensor], t: Tensor | int, shared: Sequence[Tensor]
) -> tuple[list[Tensor], Tree]:
    """Take one step, from the tensors of a state to those of the next."""
    result, aux = checked_pair(step(layout.state.fill(state), t, *layout.args.fill(shared)), -1)
    leaves, spec = tree_flatten(result)
    if spec != layout.state.spec:
        raise ValueError("the state that the step returns has another structure than the one it takes")
    new = [leaf for leaf, old in zip(leaves, layout.state.leaves, strict=True) if old is HOLE]
    for before, after in zip(state, new, strict=True):
        if not isinstance(after, Tensor) or (before.shape, before.dtype) != (after.shape, after.dtype):
            raise ValueError(
                "the state that the step returns has other shapes or dtypes than the one it takes"
            )
    return [laid_out(tensor) for tensor in new], aux


def _advance(
    step: Step, layout: Layout, state: list[Tensor], t: Tensor, shared: list[Tensor]
) -> tuple[list[Tensor], Tree]:
    """Take one step."""
    pass_gate()
    return flat_step(step, layout, state, t, shared)


class Wanted(NamedTuple):
    """Which of the tensors of a step to differentiate with respect to, and which of its results flow back."""

    state: tuple[int, ...]
    shared: tuple[int, ...]
    results: tuple[int, ...]


def _pull(
    step: Step,
    layout: Layout,
    wanted: Wanted,
    state: list[Tensor],
    t: Tensor,
    shared: list[Tensor],
    cotangents: list[Tensor],
    totals: list[Tensor],
) -> tuple[list[Tensor], list[Tensor]]:
    """Pull cotangents back through one step; return those of the state, and the totals of those of the arguments."""
    pass_gate()

    def results(states: list[Tensor], args: list[Tensor]) -> tuple[Tensor, ...]:
        new, aux = flat_step(
            step, layout, exchanged(state, wanted.state, states), t, exchanged(shared, wanted.shared, args)
        )
        found = [*new, *(leaf for leaf in tree_leaves(aux) if isinstance(leaf, Tensor))]
        return tuple(found[index] for index in wanted.results)

    pull = torch.func.vjp(results, [state[i] for i in wanted.state], [shared[i] for i in wanted.shared])[1]
    of_state, of_args = pull(tuple(cotangents))
    return [laid_out(g) for g in of_state], [laid_out(a + b) for a, b in zip(totals, of_args, strict=True)]


def exchanged(tensors: Sequence[Tensor], places: Sequence[int], chosen: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors, of which some are exchanged for others."""
    result = list(tensors)
    for index, tensor in zip(places, chosen, strict=True):
        result[index] = tensor
    return result


def _whole(
    step: Step, layout: Layout, times: range, state: list[Tensor], shared: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tree]:
    """Take all steps, whose numbers are constants."""
    pass_gate()
    collected, aux = [], None
    for t in times:
        state, aux = flat_step(step, layout, state, t, shared)
        collected.append([leaf for leaf in tree_leaves(aux) if isinstance(leaf, Tensor)])
    return state, [torch.stack(column) for column in zip(*collected, strict=True)], aux


def checked_before() -> None:
    """The VJP of a step is compiled after the step, which has been checked."""
