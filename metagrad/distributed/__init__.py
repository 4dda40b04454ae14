"""Exact averages of gradients over ranks, in buckets if dense and by an exchange of rows if row-sparse."""

from metagrad.distributed.gradients import Traffic, average_buffers, average_gradients

__all__ = ["Traffic", "average_buffers", "average_gradients"]
