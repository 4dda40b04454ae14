"""Dense Hessians by torch, in the order of a dict of parameters."""

import torch


def flat(tree, first=0):
    """Return the tensors of a dict as one vector, or as rows of vectors."""
    return torch.cat([tensor.flatten(first) for tensor in tree.values()], -1)


def dense_hessian(loss, params):
    """Return the Hessian of a function of a dict of parameters."""

    def of_flat(vector):
        parts = vector.split([p.numel() for p in params.values()])
        return loss({k: part.view(p.shape) for (k, p), part in zip(params.items(), parts, strict=True)})

    return torch.func.jacrev(torch.func.jacrev(of_flat))(flat(params).detach())
