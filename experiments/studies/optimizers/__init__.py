"""Optimizers against each other: loss against steps, gradient-equivalents and seconds, at tuned settings."""
