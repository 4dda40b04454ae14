"""Recomputation instead of storage, and the check that the second run repeats the first."""
