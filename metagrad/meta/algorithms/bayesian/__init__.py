"""Distributions over adapted parameters: particles, and samples."""
