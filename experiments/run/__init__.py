"""What surrounds the programs: configuration, the training loop, checkpoints, processes, mirrors, plots."""
