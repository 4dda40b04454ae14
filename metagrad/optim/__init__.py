"""Optimizers: pure rules, for inner loops that are differentiated through, and ``torch.optim`` shells of them."""

from metagrad.optim import rules
from metagrad.optim.kfac.optimizer import KFAC
from metagrad.optim.least_squares import LeastSquares, LeastSquaresResult, least_squares
from metagrad.optim.shells.adahessian import AdaHessian
from metagrad.optim.shells.bounded_newton import CubicNewton, TrustRegionNewton
from metagrad.optim.shells.first_order import Lion, Muon, SparseAdagrad, SparseAdam
from metagrad.optim.shells.kronecker import SOAP, Shampoo
from metagrad.optim.shells.lbfgs import LBFGS
from metagrad.optim.shells.newton import GaussNewton, NaturalGradient, NewtonCG
from metagrad.optim.shells.sophia import SophiaG, SophiaH

__all__ = [
    "KFAC",
    "LBFGS",
    "SOAP",
    "AdaHessian",
    "CubicNewton",
    "GaussNewton",
    "LeastSquares",
    "LeastSquaresResult",
    "Lion",
    "Muon",
    "NaturalGradient",
    "NewtonCG",
    "Shampoo",
    "SophiaG",
    "SophiaH",
    "SparseAdagrad",
    "SparseAdam",
    "TrustRegionNewton",
    "least_squares",
    "rules",
]
