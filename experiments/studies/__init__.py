"""The studies: each is a program of its own, of the form of `study.py`."""
