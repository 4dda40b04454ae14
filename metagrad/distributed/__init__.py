"""Gradients of several processes, averaged exactly: dense ones in buckets, row-sparse ones by their rows."""

from metagrad.distributed.averager import GradientAverager
from metagrad.distributed.buffers import average_buffers
from metagrad.distributed.gradients import average_gradients
from metagrad.distributed.traffic import Traffic

__all__ = ["GradientAverager", "Traffic", "average_buffers", "average_gradients"]
