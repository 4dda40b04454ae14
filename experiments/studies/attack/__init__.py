"""Attacks by higher-order gradients, and defences."""
