"""Recognize the loss that a callable computes, and give its curvature with respect to the outputs in closed form."""
