"""Operations on sparse matrices, composed from a family of kernels that is closed under differentiation."""
