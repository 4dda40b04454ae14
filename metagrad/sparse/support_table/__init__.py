"""The cases of the capability table, each found by running it."""
