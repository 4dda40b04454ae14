"""Linear systems with an operator: solvers, preconditioners, and derivatives of solutions."""
