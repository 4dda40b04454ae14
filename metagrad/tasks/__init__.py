"""Distributions over tasks, and the batches of tasks that are drawn from them."""

from metagrad.tasks.batch import PADDING, Batch, Examples, TaskDistribution
from metagrad.tasks.fewshot import FewShot, ImageFolders
from metagrad.tasks.omniglot import Omniglot
from metagrad.tasks.regression import (
    Curves,
    Functions,
    GaussianProcess,
    Harmonic,
    Lines,
    Regression,
    Sinusoid,
    SinusoidOrLine,
    StepFunctions,
)
from metagrad.tasks.tabular import Tabular

__all__ = [
    "PADDING",
    "Batch",
    "Curves",
    "Examples",
    "FewShot",
    "Functions",
    "GaussianProcess",
    "Harmonic",
    "ImageFolders",
    "Lines",
    "Omniglot",
    "Regression",
    "Sinusoid",
    "SinusoidOrLine",
    "StepFunctions",
    "Tabular",
    "TaskDistribution",
]
