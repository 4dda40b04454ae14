"""Loops of a compiled step: the counterparts of those in :mod:`metagrad.autograd.unrolling.schedule`."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Literal

import torch

from metagrad.autograd.compile.retained_graph import held
from metagrad.autograd.unrolling.compiled_backward import Sweep, swept
from metagrad.autograd.unrolling.compiled_loop import Around, Loop
from metagrad.autograd.unrolling.compiled_steps import Kernels
from metagrad.autograd.unrolling.schedule import Step, loop_keeping
from metagrad.core.budget import Mode
from metagrad.core.tree import Tree


def unroll_compiled(
    kernels: Kernels,
    step: Step,
    state: Tree,
    args: tuple,
    times: range,
    memory: Mode | Literal["whole"] | int,
    *,
    owner: object,
    around: Around = lambda t: contextlib.nullcontext(),
) -> tuple[Tree, Tree]:
    """Run a loop of a compiled step; its result is on the tape where grad mode is on.

    Args:
        kernels: What has been compiled so far.
        step: As :func:`metagrad.unroll` takes it; ``t``, the ints of the state and the floats of the arguments
            reach it as 0-d tensors.
        state: A tree of tensors and constants.
        args: Trees of tensors and constants.
        times: The numbers of the steps.
        memory: What is kept, see :func:`metagrad.unroll`; "whole" is one graph for all steps.
        owner: What holds the tensors that the step reads without being handed them.
        around: What to enter around each step.
    """
    make = functools.partial(Loop, kernels, owner=owner, around=around)

    def keeping_graphs(step: Step, state: Tree, args: tuple, times: range) -> tuple[Tree, Tree]:
        loop = make(step, state, args, times)
        return loop.fill(held(loop.whole if memory == "whole" else loop.chained, loop.eager, loop.tensors))

    def keeping_states(step: Step, state: Tree, args: tuple, times: range, stride: int) -> tuple[Tree, Tree]:
        return swept(make(step, state, args, times), stride)

    if not torch.is_grad_enabled():
        loop = make(step, state, args, times)
        return loop.fill(Sweep(loop, len(times)).forward(loop.tensors)[0])
    if memory == "whole":
        return keeping_graphs(step, state, args, times)
    loops = {
        "full": keeping_graphs,
        "step": functools.partial(keeping_states, stride=1),
        "sqrt": functools.partial(keeping_states, stride=max(math.isqrt(len(times)), 1)),
    }
    return loop_keeping(memory, (state, args), loops)(step, state, args, times)
