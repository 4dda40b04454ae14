"""The engine: derivatives that can be differentiated again, and schedules of what is stored and recomputed."""

from metagrad.autograd.blocks import LossAndGradient, block_gradient
from metagrad.autograd.chain import chain
from metagrad.autograd.chain_types import Block, Chain
from metagrad.autograd.grad import grad
from metagrad.autograd.gradcheck import gradcheck
from metagrad.autograd.hvp import Hvp, hvp
from metagrad.autograd.linearize import Linearization, linearize
from metagrad.autograd.lint import Finding, lint
from metagrad.autograd.missing import MissingDerivative
from metagrad.autograd.recompute import checkpoint
from metagrad.autograd.unroll import unroll

__all__ = [
    "Block",
    "Chain",
    "Finding",
    "Hvp",
    "Linearization",
    "LossAndGradient",
    "MissingDerivative",
    "block_gradient",
    "chain",
    "checkpoint",
    "grad",
    "gradcheck",
    "hvp",
    "linearize",
    "lint",
    "unroll",
]
