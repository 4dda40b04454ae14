"""Meta-learning and second-order optimization for PyTorch, with correct derivatives of every order."""

from metagrad import (
    attribution,
    autograd,
    curvature,
    distributed,
    hypergrad,
    memory,
    meta,
    models,
    optim,
    sparse,
    tasks,
    training,
)
from metagrad.attribution import attribute
from metagrad.autograd import checkpoint, grad, gradcheck, hvp, linearize, unroll
from metagrad.curvature import fisher, ggn, hessian, influence, kfac
from metagrad.hypergrad import bilevel, hypergradient
from metagrad.memory import MemoryTracker
from metagrad.meta import (
    ANIL,
    BOIL,
    CAVIA,
    FOMAML,
    MAML,
    R2D2,
    MAMLPlusPlus,
    MetaCurvature,
    MetaSGD,
    ProtoMAML,
    ProtoNet,
    Reptile,
    iMAML,
    preflight,
)
from metagrad.training import Training

__version__ = "0.1.0"

__all__ = [
    "ANIL",
    "BOIL",
    "CAVIA",
    "FOMAML",
    "MAML",
    "R2D2",
    "MAMLPlusPlus",
    "MemoryTracker",
    "MetaCurvature",
    "MetaSGD",
    "ProtoMAML",
    "ProtoNet",
    "Reptile",
    "Training",
    "attribute",
    "attribution",
    "autograd",
    "bilevel",
    "checkpoint",
    "curvature",
    "distributed",
    "fisher",
    "ggn",
    "grad",
    "gradcheck",
    "hessian",
    "hvp",
    "hypergrad",
    "hypergradient",
    "iMAML",
    "influence",
    "kfac",
    "linearize",
    "memory",
    "meta",
    "models",
    "optim",
    "preflight",
    "sparse",
    "tasks",
    "training",
    "unroll",
]
