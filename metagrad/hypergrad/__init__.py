"""Derivatives of minima, roots and fixed points, and of losses at them."""

from metagrad.hypergrad.bilevel import bilevel, hypergradient
from metagrad.hypergrad.implicit import CG, Exact, FirstOrder, Neumann, Nystrom, implicit_diff
from metagrad.hypergrad.problem import HypergradientMethod
from metagrad.hypergrad.root import Anderson, Broyden, NewtonKrylov, Root, fixed_point, implicit_root, root
from metagrad.hypergrad.unroll import FiniteDifference, Unroll

__all__ = [
    "CG",
    "Anderson",
    "Broyden",
    "Exact",
    "FiniteDifference",
    "FirstOrder",
    "HypergradientMethod",
    "Neumann",
    "NewtonKrylov",
    "Nystrom",
    "Root",
    "Unroll",
    "bilevel",
    "fixed_point",
    "hypergradient",
    "implicit_diff",
    "implicit_root",
    "root",
]
