"""Hydra programs around metagrad: training, evaluation, plots, comparison. No algorithm lives here."""
