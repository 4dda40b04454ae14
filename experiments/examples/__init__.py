"""Programs to start from: each is one use of sparse second-order differentiation, checked against dense."""
