"""Hypergradients: derivatives of a loss at the minimum of another one."""

from metagrad.hypergrad.adaptive_damping import AdaptiveDamping
from metagrad.hypergrad.attach import attach
from metagrad.hypergrad.bilevel import BilevelResult, bilevel
from metagrad.hypergrad.differences import SAMA, FiniteDifference
from metagrad.hypergrad.evolution import EvolutionStrategies, PersistentES
from metagrad.hypergrad.hypergradient import hypergradient
from metagrad.hypergrad.inverses import CG, Exact, FirstOrder, Neumann, Nystrom
from metagrad.hypergrad.penalty import BOME, F2SA
from metagrad.hypergrad.problem import Estimate, Method, Problem
from metagrad.hypergrad.unroll import Unroll

__all__ = [
    "BOME",
    "CG",
    "F2SA",
    "SAMA",
    "AdaptiveDamping",
    "BilevelResult",
    "Estimate",
    "EvolutionStrategies",
    "Exact",
    "FiniteDifference",
    "FirstOrder",
    "Method",
    "Neumann",
    "Nystrom",
    "PersistentES",
    "Problem",
    "Unroll",
    "attach",
    "bilevel",
    "hypergradient",
]
