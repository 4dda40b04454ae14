"""Execution of the tasks of a meta-batch, vectorized or in a Python loop, with checks."""
