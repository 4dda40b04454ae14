"""Recomputation instead of storage, and the proof that a second run repeats the first."""
