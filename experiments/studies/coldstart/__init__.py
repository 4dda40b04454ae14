"""Recommendation to students of whom few ratings are known."""
