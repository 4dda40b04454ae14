"""K-FAC: natural gradients by Kronecker-factored Fisher matrices of layers."""
