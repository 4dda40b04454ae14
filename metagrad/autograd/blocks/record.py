"""Running a chain block by block, and recording what it takes to run each block again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from metagrad.autograd.blocks.forward_over_reverse import Stage
from metagrad.autograd.blocks.types import Chain, Params
from metagrad.autograd.derivatives.grad import refuse_complex
from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.autograd.recompute.replay import Recording, record
from metagrad.core import _torch
from metagrad.core.tree import Tree, dissect, is_differentiable, tree_leaves


class RecordedChain(NamedTuple):
    """A chain that was run.

    Attributes:
        stages: The blocks, and the loss.
        operands: The parameters, the tensors of ``x`` and of ``y``, and the free tensors that require grad.
        kept: The inputs of each stage.
        loss: The loss, without a graph.
    """

    stages: list[Stage]
    operands: list[Tensor]
    kept: list[list[Tensor]]
    loss: Tensor


def record_chain(chain: Chain, params: Params, x: Tree, y: Tree) -> RecordedChain:
    """Run a chain block by block, and record what it takes to run each again."""
    if _torch.functorch_is_active():
        raise RuntimeError(
            "block_gradient(chain, ...): called inside a torch.func transform, where nothing can be recomputed. Call "
            "it outside, around the transform."
        )
    _check_params(chain, params)
    return _Recorder(chain, params, x, y).run()


def _check_params(chain: Chain, params: Params) -> None:
    known = {name for block in chain.blocks for name in block.parameters}
    for name, value in params.items():
        if name not in known:
            raise ValueError(
                f"block_gradient(chain, params, ...): no block of {type(chain.model).__name__} has a parameter "
                f"{name!r}. Name parameters as model.named_parameters() does."
            )
        if not isinstance(value, Tensor) or not is_differentiable(value):
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"block_gradient(chain, params, ...): params[{name!r}] must be a floating point tensor, got {got}."
            )


class _Recorder:
    """Records the stages of a chain one after the other, and collects their operands."""

    def __init__(self, chain: Chain, params: Params, x: Tree, y: Tree) -> None:
        self.chain, self.params, self.x, self.y = chain, params, x, y
        self.num_inputs = len(dissect(x)[0])
        self.operands = [*params.values(), *dissect((x, y))[0]]
        self.stages: list[Stage] = []
        self.kept: list[list[Tensor]] = [[]]
        self.free: dict[int, int] = {}

    def run(self) -> RecordedChain:
        slots = {name: index for index, name in enumerate(self.params)}
        leaves = {name: value.detach().requires_grad_() for name, value in self.params.items()}
        first = len(self.params) + self.num_inputs
        inputs, targets = list(range(len(self.params), first)), list(range(first, len(self.operands)))
        value = self.x
        with unfused_attention:
            for block in self.chain.blocks:
                name = f"block_gradient(chain, ...), block {block.name!r}"
                recording = _recorded(name, block.call, block.own(leaves), value)
                before = [*tree_leaves(block.own(slots)), *([] if self.stages else inputs)]
                value = self.append(name, recording, before)
            name = "block_gradient(chain, ...), loss_fn"
            loss_fn = self.chain.loss_fn  # and not self, which would hold what it is held by
            recording = _recorded(name, lambda y, value: loss_fn(value, y), self.y, value)
            loss = self.append(name, recording, targets)
        self.check_loss(loss)
        self.kept.pop()
        return RecordedChain(self.stages, self.operands, self.kept, loss.detach())

    def append(self, name: str, recording: Recording, before: list[int]) -> Tree:
        self.refuse_own_references(name, recording)
        after = [self.slot(tensor) for tensor in recording.call.reads.differentiable]
        outgoing = [output.requires_grad for output in recording.outputs]
        self.stages.append(Stage(name, recording.call, before, len(self.kept[-1]), after, outgoing))
        self.kept.append(recording.outputs)
        return recording.structure.fill(recording.outputs)

    def slot(self, tensor: Tensor) -> int:
        """Find the operand that a free tensor is."""
        if id(tensor) not in self.free:
            self.free[id(tensor)] = len(self.operands)
            self.operands.append(tensor)
        return self.free[id(tensor)]

    def refuse_own_references(self, name: str, recording: Recording) -> None:
        if not recording.call.reads.differentiable:
            return
        replaced = {id(p): key for key, p in self.chain.model.named_parameters() if key in self.params}
        for tensor in recording.call.reads.differentiable:
            key = replaced.get(id(tensor)) or replaced.get(id(tensor._base))
            if key is not None:
                raise ValueError(
                    f"{name}: reads the parameter {key!r} by a reference of its own, so it does not see the value in "
                    "params. Read it as an attribute of its module, inside a block, or leave it out of params."
                )

    def check_loss(self, loss: Tree) -> None:
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"block_gradient(chain, ...): loss_fn must return one tensor, got {type(loss).__name__}."
            )
        refuse_complex("block_gradient(chain, ...)", loss)


def _recorded(name: str, fn: Callable[[Tree, Tree], Tree], operands: Tree, value: Tree) -> Recording:
    try:
        return record(fn, (operands, value), {}, name=name)
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise ValueError(
            f"{name}: writes in place into its input, which the backward pass needs. Set inplace=False, or make "
            "it one block with the one before it."
        ) from error
