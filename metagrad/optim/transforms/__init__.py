"""Transforms of functional optimizers: clipping, chains, masks, schedules, Lookahead."""
