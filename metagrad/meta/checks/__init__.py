"""Checks before a training: which derivatives are correct, and how much memory a step needs."""
