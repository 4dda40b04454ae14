"""Distributions over tasks, and the batches they hand to a meta-learner."""

from metagrad.tasks.batch import Batch, Examples, TaskDistribution
from metagrad.tasks.omniglot import Omniglot
from metagrad.tasks.sinusoid import Sinusoid

__all__ = ["Batch", "Examples", "Omniglot", "Sinusoid", "TaskDistribution"]
