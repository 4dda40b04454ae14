"""The loss of a model as a function of its parameters, for one task or for many at once."""
