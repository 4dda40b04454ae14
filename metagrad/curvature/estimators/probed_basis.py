"""What XTrace and XDiag are made of: probes, a basis of their products, and the products of that."""

from __future__ import annotations

import torch

from metagrad.curvature.estimators.basis import Basis
from metagrad.curvature.estimators.probing import Probing


class ProbedBasis:
    """Probes ``[k, n]``, an orthonormal basis of their products, and the products of the basis.

    Args:
        probing: What draws and multiplies.
    """

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        dtype, device = probing.operator.dtype, probing.operator.device
        self.basis = Basis(probing.n, dtype, device)
        nothing = torch.empty(0, probing.n, dtype=dtype, device=device)
        self.probes, self.products_of_basis = nothing, nothing

    def extend(self, products: int) -> None:
        """Spend so many more products: half on probes, half on the basis of their products."""
        probing = self.probing
        count = min(products // 2, probing.n - len(self.probes))
        if count:
            probes = probing.draw(count)
            new = self.basis.append(probing.products(probes), probing.call)
            self.probes = torch.cat([self.probes, probes])
            self.products_of_basis = torch.cat([self.products_of_basis, probing.products(new)])
