"""Optimizers: pure rules, for inner loops that are differentiated through, and ``torch.optim`` shells of them."""

from metagrad.optim import rules
from metagrad.optim.newton.least_squares import LeastSquares, LeastSquaresResult, least_squares
from metagrad.optim.torch_optim.adahessian import AdaHessian
from metagrad.optim.torch_optim.bounded_newton import CubicNewton, TrustRegionNewton
from metagrad.optim.torch_optim.first_order import Lion, Muon, SparseAdagrad, SparseAdam
from metagrad.optim.torch_optim.kfac import KFAC
from metagrad.optim.torch_optim.kronecker import SOAP, Shampoo
from metagrad.optim.torch_optim.lbfgs import LBFGS
from metagrad.optim.torch_optim.newton import GaussNewton, NaturalGradient, NewtonCG
from metagrad.optim.torch_optim.sophia import SophiaG, SophiaH

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
