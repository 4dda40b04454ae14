"""Hypergradients: derivatives of a loss at the minimum of another one."""

from metagrad.hypergrad.bilevel import bilevel
from metagrad.hypergrad.differences import FiniteDifference
from metagrad.hypergrad.hypergradient import hypergradient
from metagrad.hypergrad.implicit_diff import implicit_diff
from metagrad.hypergrad.inverses import CG, Exact, FirstOrder, Neumann, Nystrom
from metagrad.hypergrad.problem import Method
from metagrad.hypergrad.unroll import Unroll

__all__ = [
    "CG",
    "Exact",
    "FiniteDifference",
    "FirstOrder",
    "Method",
    "Neumann",
    "Nystrom",
    "Unroll",
    "bilevel",
    "hypergradient",
    "implicit_diff",
]
