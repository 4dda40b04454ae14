"""Recording one call of a function so that it can be run again on other values of what it read.

Recomputation is right only if the second run sees what the first one saw. A :class:`Call` therefore captures, at
call time, everything that can differ later: the arguments, the tensors that the function read without being handed
them (:mod:`metagrad.autograd.reads`), and the random numbers and the autocast state
(:mod:`metagrad.autograd.ambient`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metagrad._tree import Structure, Tree, dissect, fresh_leaf
from metagrad.autograd.ambient import AutocastState, RandomState
from metagrad.autograd.reads import Reads, Recorder, unobserved


class Recording(NamedTuple):
    """A call that was made.

    Attributes:
        call: The call, as a function of ``tensors``.
        tensors: What it can be differentiated with respect to: the tensors among its arguments, then the
            free tensors that require grad.
        outputs: The tensors it returned, each a fresh leaf whose ``requires_grad`` says if it had a graph.
        structure: Where these stand in the returned tree.
    """

    call: Call
    tensors: list[Tensor]
    outputs: list[Tensor]
    structure: Structure


class Call:
    """A recorded call, as a function of a flat list of tensors that can be run any number of times."""

    def __init__(self, fn: Callable[..., Tree], name: str, arguments: Structure, num_arguments: int) -> None:
        self.fn = fn
        self.name = name
        self.arguments = arguments
        self.num_arguments = num_arguments
        self.reads = Reads()
        with unobserved():
            self.random = RandomState()
            self.autocast = AutocastState()

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the function again, on other values of the recorded tensors."""
        handed, free = tensors[: self.num_arguments], tensors[self.num_arguments :]
        args, kwargs = self.arguments.fill(handed)
        with self.random.restored(), self.autocast.restored(), self.reads.substituted(self.name, free):
            return _run(self.fn, args, kwargs)[0]


def _run(fn: Callable[..., Tree], args: tuple, kwargs: dict[str, Any]) -> tuple[list[Tensor], Structure]:
    """Call a function; a free tensor that it returns as it is passes a torch function, and so is read."""
    outputs, structure = dissect(fn(*args, **kwargs))
    return [output.view_as(output) for output in outputs], structure


def record(fn: Callable[..., Tree], args: tuple, kwargs: dict[str, Any], *, name: str) -> Recording:
    """Call ``fn(*args, **kwargs)`` and record what it takes to call it again.

    The call is made on detached arguments; its graph is dropped when it returns.

    Args:
        fn: Returns a tree of tensors; deterministic but for torch's random numbers.
        args: Trees of tensors and constants.
        kwargs: Likewise.
        name: How errors name the call.

    Raises:
        ValueError: ``fn`` writes in place into a tensor it did not make, or depends on a tensor that
            requires grad and that no torch function was seen to read.
    """
    tensors, arguments = dissect((args, kwargs))
    call = Call(fn, name, arguments, len(tensors))
    handed = [fresh_leaf(tensor) for tensor in tensors]
    versions = [tensor._version for tensor in handed]
    fresh_args, fresh_kwargs = arguments.fill(handed)
    with torch.enable_grad(), Recorder(call.reads, handed) as recorder:
        outputs, structure = _run(fn, fresh_args, fresh_kwargs)
    if any(tensor._version != version for tensor, version in zip(handed, versions, strict=True)):
        raise ValueError(
            f"{name}: the function writes in place into one of its arguments, so running it again would see "
            "another value. Write into a copy."
        )
    with unobserved():
        call.random.close()
        call.reads.close(name)
        recorder.refuse_unseen(name, outputs)
    return Recording(
        call, tensors + call.reads.differentiable, [fresh_leaf(output) for output in outputs], structure
    )
