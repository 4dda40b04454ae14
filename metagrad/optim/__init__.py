"""Optimizers: functional optimizers for differentiable inner loops, and their ``torch.optim`` forms."""

from metagrad.optim import rules
from metagrad.optim.first_order.lion import Lion
from metagrad.optim.kronecker.muon import Muon
from metagrad.optim.kronecker.shampoo import Shampoo
from metagrad.optim.kronecker.soap import SOAP
from metagrad.optim.newton.gauss_newton import GaussNewton
from metagrad.optim.newton.lbfgs import LBFGS
from metagrad.optim.newton.least_squares import LeastSquares, LeastSquaresResult, least_squares
from metagrad.optim.newton.newton import NewtonCG
from metagrad.optim.second_order.diagonal import AdaHessian, SophiaG, SophiaH
from metagrad.optim.second_order.kfac import KFAC
from metagrad.optim.sharpness_aware import sharpness_aware
from metagrad.optim.torch_optim.sparse_adam import SparseAdam

__all__ = [
    "KFAC",
    "LBFGS",
    "SOAP",
    "AdaHessian",
    "GaussNewton",
    "LeastSquares",
    "LeastSquaresResult",
    "Lion",
    "Muon",
    "NewtonCG",
    "Shampoo",
    "SophiaG",
    "SophiaH",
    "SparseAdam",
    "least_squares",
    "rules",
    "sharpness_aware",
]
