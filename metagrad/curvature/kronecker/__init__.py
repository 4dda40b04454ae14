"""K-FAC: Kronecker factors of the layers of a model, the operator that is made of them, and their observation."""
