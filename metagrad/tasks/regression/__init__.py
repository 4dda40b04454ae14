"""Regression tasks with random target functions."""

from metagrad.tasks.regression.curves import Harmonic, Lines, Sinusoid, SinusoidOrLine, StepFunctions
from metagrad.tasks.regression.family import Curves, Functions, Regression
from metagrad.tasks.regression.gaussian_process import GaussianProcess

__all__ = [
    "Curves",
    "Functions",
    "GaussianProcess",
    "Harmonic",
    "Lines",
    "Regression",
    "Sinusoid",
    "SinusoidOrLine",
    "StepFunctions",
]
