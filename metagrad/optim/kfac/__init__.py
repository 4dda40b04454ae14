"""K-FAC: natural gradients by Kronecker-factored Fisher matrices of layers."""

from metagrad.optim.kfac.optimizer import KFAC

__all__ = ["KFAC"]
