"""Estimates of the trace and the diagonal, one class for each method."""
