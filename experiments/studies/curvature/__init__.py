"""Curvature along training, or of a checkpoint: traces by layer, top eigenvalues, the density of the spectrum."""
