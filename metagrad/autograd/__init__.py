"""Derivatives that can be differentiated again, gradient checkpointing, and checks of derivatives."""

from metagrad.autograd.checks.gradcheck import gradcheck
from metagrad.autograd.checks.lint import Finding, lint
from metagrad.autograd.checks.missing_derivatives import MissingDerivative
from metagrad.autograd.derivatives.grad import grad
from metagrad.autograd.derivatives.hvp import Hvp, hvp
from metagrad.autograd.derivatives.linearize import Linearization, linearize
from metagrad.autograd.derivatives.value_and_grad import value_and_grad
from metagrad.autograd.recompute.checkpoint import checkpoint
from metagrad.autograd.recompute.chunks import attention, linear_cross_entropy
from metagrad.autograd.unrolling.unroll import unroll

__all__ = [
    "Finding",
    "Hvp",
    "Linearization",
    "MissingDerivative",
    "attention",
    "checkpoint",
    "grad",
    "gradcheck",
    "hvp",
    "linear_cross_entropy",
    "linearize",
    "lint",
    "unroll",
    "value_and_grad",
]
