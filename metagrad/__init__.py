"""Meta-learning and second-order optimization on PyTorch, right at every order."""

from metagrad import autograd, memory, meta, models, optim, sparse, tasks
from metagrad.autograd import checkpoint, grad, gradcheck, hvp, unroll
from metagrad.memory import MemoryTracker
from metagrad.meta import MAML

__version__ = "0.1.0"

__all__ = [
    "MAML",
    "MemoryTracker",
    "autograd",
    "checkpoint",
    "grad",
    "gradcheck",
    "hvp",
    "memory",
    "meta",
    "models",
    "optim",
    "sparse",
    "tasks",
    "unroll",
]
