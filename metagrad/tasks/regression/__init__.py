"""Regression to curves that are drawn at random."""

from metagrad.tasks.regression.curves import Harmonic, Linear, Sinusoid, SinusoidOrLine, Step
from metagrad.tasks.regression.family import Curves, Functions, Regression
from metagrad.tasks.regression.gaussian_process import GaussianProcess

__all__ = [
    "Curves",
    "Functions",
    "GaussianProcess",
    "Harmonic",
    "Linear",
    "Regression",
    "Sinusoid",
    "SinusoidOrLine",
    "Step",
]
