"""What is computed with sparse matrices: a closed family of kernels, and what is composed from it."""
