"""Curvature: Hessian, Gauss-Newton and Fisher as linear operators, with estimators and solvers on them."""

from metagrad.curvature.estimators.estimate import Estimate
from metagrad.curvature.estimators.probes import sample_probes
from metagrad.curvature.estimators.trace import diagonal, trace
from metagrad.curvature.influence import InfluenceScores, influence
from metagrad.curvature.kronecker.operator import Kronecker, kfac
from metagrad.curvature.linear_map import LinearMap
from metagrad.curvature.operators.ggn import fisher, ggn
from metagrad.curvature.operators.hessian import hessian
from metagrad.curvature.operators.jacobian import Jacobian, jacobian
from metagrad.curvature.operators.operator import Averaged, Operator
from metagrad.curvature.operators.space import ParameterSpace
from metagrad.curvature.sharpness import Sharpness
from metagrad.curvature.solvers.nystrom import nystrom
from metagrad.curvature.solvers.solution import Result, Solution, SolveError
from metagrad.curvature.solvers.solve import solve
from metagrad.curvature.spectrum.eigenvalues import Eigenpairs, eigenvalues
from metagrad.curvature.spectrum.quadrature import Density, log_determinant, spectral_density, trace_of

__all__ = [
    "Averaged",
    "Density",
    "Eigenpairs",
    "Estimate",
    "InfluenceScores",
    "Jacobian",
    "Kronecker",
    "LinearMap",
    "Operator",
    "ParameterSpace",
    "Result",
    "Sharpness",
    "Solution",
    "SolveError",
    "diagonal",
    "eigenvalues",
    "fisher",
    "ggn",
    "hessian",
    "influence",
    "jacobian",
    "kfac",
    "log_determinant",
    "nystrom",
    "sample_probes",
    "solve",
    "spectral_density",
    "trace",
    "trace_of",
]
