"""Hessian, Gauss-Newton and Fisher matrices as linear operators, on the parameters of a model."""
