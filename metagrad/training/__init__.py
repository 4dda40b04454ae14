"""Training as a differentiable function of data, example weights, hyperparameters and initial parameters."""

from metagrad.training.training import Trained, Training
from metagrad.training.trajectory import Report

__all__ = ["Report", "Trained", "Training"]
