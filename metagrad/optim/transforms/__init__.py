"""Transforms of functional optimizers: clipping, chains, masks and schedules."""
