"""The loss and the gradient of a chain of blocks as one differentiable operation that keeps no graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.blocks.forward_over_reverse import (
    Maybe,
    Rates,
    Stage,
    compose,
    pull_back,
    pull_back_rates,
    refuse_defects,
)
from metagrad.autograd.blocks.record import record_chain
from metagrad.autograd.blocks.types import Chain, Params
from metagrad.autograd.derivatives.quick.attention import unfused_attention
from metagrad.autograd.recompute.checkpoint import Vjp, attached
from metagrad.core.tree import Tree, zeros_for_none


class LossAndGradient(NamedTuple):
    """A loss, and its gradient; :func:`block_gradient` makes it.

    Attributes:
        loss: A scalar.
        gradient: By the names of the parameters, in their shapes.
    """

    loss: Tensor
    gradient: Params


def block_gradient(chain: Chain, params: Params, x: Tree, y: Tree) -> LossAndGradient:
    r"""Compute the loss of a chain and its gradient, holding the graph of one block at a time.

    .. math:: L = \ell(f_L(\theta_L, \dots f_1(\theta_1, x)), y), \qquad g = \nabla_\theta L

    What is returned can be differentiated, with respect to the parameters, floating ``x`` and ``y``, and every
    other tensor that the blocks read. Nothing is kept for it but these operands; the derivative walks over the
    blocks forward and back (forward over reverse), at the cost of four to five gradients, and holds what passes
    between the blocks, its rates of change, and one block's graph. It sees what the first pass saw: dropout masks,
    autocast, batch statistics; running statistics are updated once. It can be differentiated again, to any order;
    those derivatives hold the whole graph.

    Args:
        chain: Of :func:`metagrad.autograd.chain`.
        params: Parameters by name, some or all; the others are the model's own. Those that the loss does not use
            get zeros.
        x: What the first block takes: a tensor or a tree.
        y: What the loss function takes beside the prediction.

    Returns:
        The loss, and the gradient in the order of ``params``. A loss that is no scalar (one for each task of a
        batch) is returned as it is; the gradient is that of its sum.

    Raises:
        ValueError: A name is not a parameter of the blocks; a block or the loss reads a parameter through another
            reference than its module, so that it cannot be replaced, or writes in place into its input; the loss
            depends on no parameter; or, on differentiation, an operation has no second derivative. The block is
            named.
        TypeError: A parameter is not a floating point tensor, or the loss is not one tensor.
        RuntimeError: Called inside a ``torch.func`` transform, where nothing can be recomputed; put it around.

    Note:
        Attention runs as ``SDPBackend.MATH``: no other kernel has second derivatives.

    Example:
        :math:`L = (a x)^2`, so :math:`g = 2 a x^2` and :math:`\partial g / \partial a = 2 x^2`:

        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        >>> loss = metagrad.autograd.chain(model, lambda prediction, y: (prediction - y).square().sum())
        >>> a, x = torch.tensor([[3.0]], requires_grad=True), torch.tensor([[2.0]])
        >>> value, grads = metagrad.autograd.block_gradient(loss, {"0.weight": a}, x, torch.zeros(1, 1))
        >>> value.item(), grads["0.weight"].item(), metagrad.grad(grads["0.weight"], a).item()
        (36.0, 24.0, 8.0)

    References:
        Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1), 1994; Griewank, Walther,
        "Evaluating Derivatives", 2nd ed., section 5.2; Kemaev et al., "Scalable meta-learning via mixed-mode
        differentiation", arXiv:2505.00793.
    """
    recorded = record_chain(chain, params, x, y)
    gradient = BlockwiseGradient(recorded.stages, len(params), torch.ones_like(recorded.loss))
    with unfused_attention:
        grads = gradient.of(recorded.operands, recorded.kept)
    outputs = [result.detach().requires_grad_() for result in (recorded.loss, *grads)]
    results = attached(gradient, recorded.operands, outputs)
    return LossAndGradient(results[0], dict(zip(params, results[1:], strict=True)))


class BlockwiseGradient:
    """The loss and the gradient of a recorded chain, as a function of its operands.

    Attributes:
        stages: The blocks, and the loss.
        num_params: How many of the operands the gradient is taken with respect to; they come first.
        seed: The cotangent of the loss: ones of its shape.
    """

    def __init__(self, stages: list[Stage], num_params: int, seed: Tensor) -> None:
        self.stages = stages
        self.num_params = num_params
        self.seed = seed

    def product(self, num_tensors: int, wanted: Sequence[int], present: Sequence[int]) -> Vjp:
        """Return the vector-Jacobian product of the loss and the gradient."""
        return _BlockwiseVjp(self, num_tensors, wanted, present)

    def of(self, operands: Sequence[Tensor], kept: list[list[Tensor]]) -> list[Tensor]:
        """Walk back from the loss; return the gradients of the parameters."""
        wanted = [index < self.num_params for index in range(len(operands))]
        leaves = [t.detach().requires_grad_(want) for t, want in zip(operands, wanted, strict=True)]
        with torch.no_grad():
            grads = pull_back(self.stages, leaves, kept, self.seed)[: self.num_params]
        return filled(grads, operands[: self.num_params])

    def rates(
        self,
        operands: Sequence[Tensor],
        needed: Sequence[bool],
        directions: Maybe,
        rate: Tensor | None,
        *,
        with_gradients: bool = False,
    ) -> Rates:
        """Walk forward and back; return how the gradients of the operands change with the parameters."""
        everywhere: Maybe = [*directions, *[None] * (len(operands) - self.num_params)]
        wanted = [need or direction is not None for need, direction in zip(needed, everywhere, strict=True)]
        leaves = [t.detach().requires_grad_(want) for t, want in zip(operands, wanted, strict=True)]
        with unfused_attention, torch.no_grad():
            return pull_back_rates(
                self.stages, leaves, everywhere, self.seed, rate, with_gradients=with_gradients
            )

    def __call__(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute the loss and the gradients on one tape: what third derivatives are taken of."""
        params = [p if p.requires_grad else p.detach().requires_grad_() for p in operands[: self.num_params]]
        with unfused_attention:
            loss = compose(self.stages, [*params, *operands[self.num_params :]])
            refuse_defects("block_gradient(chain, ...), differentiated twice", [loss], order=3)
            grads = torch.autograd.grad(loss, params, self.seed, create_graph=True, allow_unused=True)
        return [loss, *filled(grads, params)]


class _BlockwiseVjp(Vjp):
    """The vector-Jacobian product of a :class:`BlockwiseGradient`: block by block where no graph is asked for."""

    call: BlockwiseGradient

    def __call__(self, operands: Sequence[Tensor]) -> Sequence[Tensor | None]:
        if torch.is_grad_enabled():
            return super().__call__(operands)
        tensors = operands[: self.num_tensors]
        given = dict(zip(self.present, operands[self.num_tensors :], strict=True))
        directions = [given.get(1 + index) for index in range(self.call.num_params)]
        needed = [index in self.wanted for index in range(len(tensors))]
        rates = self.call.rates(tensors, needed, directions, given.get(0)).rates
        return [rates[index] for index in self.wanted]


def filled(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Put zeros where a parameter has no influence; refuse if none has any."""
    if all(gradient is None for gradient in grads):
        raise ValueError(
            "block_gradient(chain, ...): the loss depends on none of the parameters. Is something detached, or "
            "computed under torch.no_grad()?"
        )
    return zeros_for_none(grads, params)
