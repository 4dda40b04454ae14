"""Algorithms of a shared embedding and a head that is fitted to the support examples of each task."""
