"""Distributions over tasks, and the batches they hand to a meta-learner."""

from metagrad.tasks.batch import Batch, Examples
from metagrad.tasks.distribution import TaskDistribution
from metagrad.tasks.omniglot import Omniglot
from metagrad.tasks.sinusoid import Sinusoid

__all__ = ["Batch", "Examples", "Omniglot", "Sinusoid", "TaskDistribution"]
