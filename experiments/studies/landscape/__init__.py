"""The loss landscape that optimizers train in: eigenvalues, traces, densities, and the edge of stability of each."""
