"""How traces and diagonals are estimated: one class for each method, and what they share."""
