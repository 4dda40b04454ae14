"""Every meta-learning algorithm by one protocol."""
