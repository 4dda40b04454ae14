"""Plots of a run and of a comparison, drawn from the files of run folders."""
