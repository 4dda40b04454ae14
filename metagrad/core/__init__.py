"""Shared utilities: pytrees, parameter substitution, captured state, and the private names of torch."""
