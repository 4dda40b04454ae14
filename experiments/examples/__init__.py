"""Programs to start from: each is one use of sparse second-order differentiation, compared with its dense version."""
