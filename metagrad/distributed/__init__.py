"""Exact averages of gradients over ranks. Dense gradients use buckets, row-sparse gradients exchange rows."""

from metagrad.distributed.gradients import Traffic, average_buffers, average_gradients

__all__ = ["Traffic", "average_buffers", "average_gradients"]
