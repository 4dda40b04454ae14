"""Cleaning of data: weights of examples, learned on a few that are known to be right."""
