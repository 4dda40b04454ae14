"""The engine: derivatives that can be differentiated again, and schedules of what is stored and recomputed."""

from metagrad.autograd.grad import grad
from metagrad.autograd.gradcheck import gradcheck
from metagrad.autograd.lint import Finding, lint
from metagrad.autograd.recompute import checkpoint
from metagrad.autograd.unroll import unroll

__all__ = ["Finding", "checkpoint", "grad", "gradcheck", "lint", "unroll"]
