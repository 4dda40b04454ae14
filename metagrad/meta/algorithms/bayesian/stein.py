"""Stein variational gradients: particles that descend together and repel each other."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metagrad.core.tree import widened
from metagrad.curvature.rows import inner
from metagrad.optim.rule import RuleNode
from metagrad.optim.rules import Params


@dataclass(frozen=True, eq=False)
class SVGD(RuleNode):
    r"""The transform of gradients of Stein variational gradient descent, for particles of :math:`e^{-L/T}`.

    .. math::
        d_i = \frac{1}{M} \sum_j \bigl( k(\theta_j, \theta_i) \nabla L(\theta_j)
            - T \nabla_{\theta_j} k(\theta_j, \theta_i) \bigr), \qquad
        k(a, b) = e^{-|a - b|^2 / h}, \quad h = \mathrm{med}^2 / \log M

    with the median of the distances of two particles. Derivatives go through the kernel and the median.

    Args:
        temperature: T.
        bandwidth: h; None takes that of the median, of an even number of distances the lower one.
        batch_ndim: How many first axes of a parameter are not its own; the last of these counts particles.

    References:
        Liu, Wang, "Stein variational gradient descent: a general purpose Bayesian inference algorithm", NeurIPS 2016,
        equation 8 and section 5.
    """

    temperature: float = 1.0
    bandwidth: float | None = None
    batch_ndim: int = 1

    def init(self, params: Params) -> tuple[()]:
        """Return the state: there is none."""
        return ()

    def transform(self, grads: Params, state: tuple[()], params: Params) -> tuple[Params, tuple[()]]:
        """Return directions of the gradients of the sum of the losses of the particles."""
        count = next(iter(params.values())).shape[self.batch_ndim - 1]
        if count == 1:
            return grads, state
        centred = {name: self._centred(p) for name, p in params.items()}
        squares = _squared_distances(list(centred.values()))
        h = _of_median(squares) if self.bandwidth is None else squares.new_full((), self.bandwidth)
        h = h.reshape(*h.shape, 1, 1)
        kernel, slope = (-squares / h).exp() / count, 2 * self.temperature / h

        def direction(gradient: Tensor, place: Tensor) -> Tensor:
            k = kernel.to(place.dtype)
            moves = k @ place - k.sum(-1, keepdim=True) * place
            found = k @ gradient.reshape(place.shape).to(place.dtype) + slope.to(place.dtype) * moves
            return found.reshape(gradient.shape).to(gradient.dtype)

        return {name: direction(g, centred[name]) for name, g in grads.items()}, state

    def _centred(self, param: Tensor) -> Tensor:
        """Return the particles about their mean, ``[..., M, D]``: distances are sums of few large numbers then."""
        # In half precision distances would be zero or infinite.
        flat = widened(param).reshape(*param.shape[: self.batch_ndim], -1)
        return flat - flat.mean(-2, keepdim=True)


def _squared_distances(places: list[Tensor]) -> Tensor:
    """Return the squared distances ``[..., M, M]`` of particles of several parameters, ``[..., M, D]`` each."""
    dtype = functools.reduce(torch.promote_types, [place.dtype for place in places])
    gram = torch.stack([inner(place, place).to(dtype) for place in places]).sum(0)
    norms = torch.stack([place.square().sum(-1).to(dtype) for place in places]).sum(0)
    return (norms.unsqueeze(-1) + norms.unsqueeze(-2) - 2 * gram).clamp_min(0)


def _of_median(squares: Tensor) -> Tensor:
    """Return the bandwidth; where most particles are the same, at which no kernel has a width, that is 1."""
    count = squares.shape[-1]
    first, second = torch.triu_indices(count, count, offset=1, device=squares.device)
    h = squares[..., first, second].median(-1).values / math.log(count)
    return torch.where(h > 0, h, 1)
