"""Time and memory of meta-gradients, by metagrad and other libraries: `python -m experiments.benchmarks.maml`."""
