"""Time and weigh meta-gradients, ours and others': `python -m experiments.benchmarks.maml`."""
