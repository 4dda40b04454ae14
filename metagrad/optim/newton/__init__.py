"""Newton's method and its relatives, as functional optimizers."""
