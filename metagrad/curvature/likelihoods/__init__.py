"""Which loss a callable computes, and its curvature in the outputs in closed form."""
