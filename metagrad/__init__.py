"""Meta-learning and second-order optimization on PyTorch, right at every order."""

from metagrad import autograd, curvature, hypergrad, memory, meta, models, optim, sparse, tasks
from metagrad.autograd import checkpoint, grad, gradcheck, hvp, linearize, unroll
from metagrad.curvature import fisher, ggn, hessian
from metagrad.hypergrad import bilevel, hypergradient
from metagrad.memory import MemoryTracker
from metagrad.meta import (
    ANIL,
    BMAML,
    BOIL,
    CAVIA,
    FOMAML,
    LRD2,
    MAML,
    R2D2,
    Leap,
    MAMLPlusPlus,
    MetaCurvature,
    MetaOptNet,
    MetaSGD,
    ProtoMAML,
    ProtoNet,
    Reptile,
    WarpGrad,
    iMAML,
    preflight,
)

__version__ = "0.1.0"

__all__ = [
    "ANIL",
    "BMAML",
    "BOIL",
    "CAVIA",
    "FOMAML",
    "LRD2",
    "MAML",
    "R2D2",
    "Leap",
    "MAMLPlusPlus",
    "MemoryTracker",
    "MetaCurvature",
    "MetaOptNet",
    "MetaSGD",
    "ProtoMAML",
    "ProtoNet",
    "Reptile",
    "WarpGrad",
    "autograd",
    "bilevel",
    "checkpoint",
    "curvature",
    "fisher",
    "ggn",
    "grad",
    "gradcheck",
    "hessian",
    "hvp",
    "hypergrad",
    "hypergradient",
    "iMAML",
    "linearize",
    "memory",
    "meta",
    "models",
    "optim",
    "preflight",
    "sparse",
    "tasks",
    "unroll",
]
