"""Optimizers: pure rules, for inner loops that are differentiated through, and ``torch.optim`` shells of them."""

from metagrad.optim import rules
from metagrad.optim.shells.adahessian import AdaHessian
from metagrad.optim.shells.first_order import Lion, Muon, SparseAdagrad, SparseAdam
from metagrad.optim.shells.sophia import SophiaG, SophiaH

__all__ = [
    "AdaHessian",
    "Lion",
    "Muon",
    "SophiaG",
    "SophiaH",
    "SparseAdagrad",
    "SparseAdam",
    "rules",
]
