"""Operations on sparse matrices, composed from kernels that are closed under differentiation."""
