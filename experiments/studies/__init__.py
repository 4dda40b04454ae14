"""The studies: each is a separate program in the form of `study.py`."""
