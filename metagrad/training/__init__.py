"""Trainings as differentiable functions: derivatives through every step with respect to data, weights and rates."""

from metagrad.training.training import Trained, Training
from metagrad.training.trajectory import Report

__all__ = ["Report", "Trained", "Training"]
