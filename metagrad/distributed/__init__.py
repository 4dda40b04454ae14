"""Gradients of several processes, averaged exactly: dense ones in buckets, row-sparse ones by their rows."""

from metagrad.distributed.gradients import Traffic, average_buffers, average_gradients

__all__ = ["Traffic", "average_buffers", "average_gradients"]
