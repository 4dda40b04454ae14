"""A loss of the output of a model that is written by hand, with its curvature by differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from metagrad.curvature.likelihoods.output_losses import OutputLoss


class WrittenLoss(OutputLoss):
    r"""A loss of an output :math:`z` that is known by its values: its Hessian is differentiated for each product.

    What distribution it is the likelihood of is not known, so that there is no Fisher matrix.

    Args:
        loss_fn: An output to a loss of one element.
        output: :math:`z`, on the tape of the model.

    Example:
        >>> from metagrad.optim.torch_optim.output_loss import WrittenLoss
        >>> loss = WrittenLoss(lambda z: (z**3).sum(), torch.tensor([1.0, 2.0]))
        >>> loss.hessian_product(torch.ones(2))
        tensor([ 6., 12.])
    """

    def __init__(self, loss_fn: Callable[[Tensor], Tensor], output: Tensor) -> None:
        self._loss_fn = loss_fn
        self.output = output
        self.scale = output.new_ones(())
        self.count = None

    def hessian_product(self, vectors: Tensor) -> Tensor:
        """Multiply by the Hessian."""
        with torch.enable_grad():
            z = self.output.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._loss_fn(z), z, create_graph=True)
            if not gradient.requires_grad:
                return torch.zeros_like(z)
            (product,) = torch.autograd.grad(gradient, z, vectors, allow_unused=True)
        return torch.zeros_like(z) if product is None else product

    def fisher_product(self, vectors: Tensor) -> NoReturn:
        """Refuse."""
        self._refuse("Fisher matrix", "Use GaussNewton, whose matrix it is where z are natural parameters")

    def root_product(self, vectors: Tensor, *, transpose: bool = False) -> NoReturn:
        """Refuse."""
        self._refuse("square root of the Fisher matrix", "Use one of the losses of torch.nn.functional")

    def score(self, generator: torch.Generator | None) -> NoReturn:
        """Refuse."""
        self._refuse("distribution of labels", "Set preconditioner=None")

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"output_loss(loss_fn, output): of a loss written by hand, the {what} is not known. {remedy}."
        )
