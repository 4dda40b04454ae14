"""The curvature of a loss whose gradient is on the tape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metagrad.autograd.derivatives.graph_vjp import TransposedProduct, graph_vjp, transposed_product
from metagrad.core.tree import widened
from metagrad.curvature.likelihoods.output_losses import OutputLoss
from metagrad.optim.curvature import Diagonal
from metagrad.optim.probes import Generators, as_rows, drawn_like, torchs_own
from metagrad.optim.rule import Params
from metagrad.sparse.tables.row_sparse import RowSparse

_SMALL = 2**16  # elements, whose copy costs less than one cotangent for each parameter


class WeightedLoss(NamedTuple):
    """A loss of known form that a total contains, and the derivative of the total with respect to it."""

    loss: OutputLoss
    weight: Tensor  # 0-d


class TapeCurvature:
    r"""The curvature of a loss, by differentiating a gradient that is on the tape.

    .. math:: H v = \nabla \langle g, v \rangle, \qquad
              \mathrm{diag}(H) \approx \frac{1}{S} \sum_{s=1}^{S} z_s \odot H z_s, \qquad
              \mathrm{diag}(G) \approx \frac{1}{S} \sum_{s=1}^{S}
                  \Bigl(\sum_n \sqrt{w_n} \, \nabla \ell_n(\hat y_{n,s})\Bigr)^2

    with probes :math:`\mathbb{E}[z z^\top] = I`, and labels :math:`\hat y_n` drawn from what the model predicts for
    the datum of weight :math:`w_n`.

    Args:
        params: Parameters by name, with respect to which the gradient was taken.
        grads: Their gradient, with its graph (``create_graph=True``) where products are asked for. One may be
            RowSparse or COO: its probes have the rows that it has, and outside of them the Hessian is zero.
        losses: What the loss consists of, for the Gauss-Newton matrix; parts that are not listed, such as a penalty
            on the weights, do not enter it. Or a function that returns this, called when it is needed.
        create_graph: Put the results on the tape.
        generators: Where random numbers come from.

    Example:
        :math:`L = \sum_k \theta_k^3` has the Hessian :math:`\mathrm{diag}(6 \theta)`, of which one probe suffices:

        >>> from metagrad.optim.curvature import Diagonal
        >>> from metagrad.optim.tape_curvature import TapeCurvature
        >>> params = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
        >>> grads = metagrad.grad((params["w"] ** 3).sum(), params, create_graph=True)
        >>> TapeCurvature(params, grads).diagonal(Diagonal("hessian"))
        {'w': tensor([ 6., 12.])}

    References:
        Bekas, Kokiopoulou, Saad, "An estimator for the diagonal of a matrix", Applied Numerical Mathematics 57, 2007;
        Liu et al., "Sophia", ICLR 2024, section 2.3, for the second estimate.
    """

    def __init__(
        self,
        params: Params,
        grads: Params,
        *,
        losses: Sequence[WeightedLoss] | Callable[[], Sequence[WeightedLoss]] = (),
        create_graph: bool = False,
        generators: Generators = torchs_own,
    ) -> None:
        self._params = params
        self._grads = grads
        self._losses = losses
        self._create_graph = create_graph
        self._generators = generators
        self._recorded: dict[Tensor, TransposedProduct] = {}  # by output

    def products(self, v: Params, *, retain_graph: bool = True) -> Params:
        """Multiply the Hessian with ``v``, of the structure of the parameters.

        Args:
            v: By parameter name, in the shapes of the parameters, or with the rows of a sparse gradient.
            retain_graph: Keep the graph for another product.
        """
        cotangents = [_in_layout_of(g, v[key]) for key, g in self._grads.items()]
        return self._pulled_back([*self._grads.values()], cotangents, retain_graph=retain_graph)

    def product_of_vector(self, v: Tensor) -> Tensor | None:
        """Multiply the Hessian with all elements in one vector; None where the gradient is not small and of one kind.

        Autograd has fewer checks for one cotangent than for one of each parameter.
        """
        if self._flat is None:
            return None
        found = self._pulled_back([self._flat], [v])
        return torch.cat([product.reshape(-1) for product in found.values()])

    @functools.cached_property
    def _flat(self) -> Tensor | None:
        """The gradient as one vector, with its graph."""
        grads = list(self._grads.values())
        kinds = {(type(g), g.layout, g.dtype, g.device) for g in grads}
        is_one = len(kinds) == 1 and kinds.pop()[:2] == (Tensor, torch.strided)
        if not is_one or sum(g.numel() for g in grads) > _SMALL:
            return None
        with torch.enable_grad():
            flat = torch.cat([g.reshape(-1) for g in grads])
        return flat if flat.requires_grad else None

    def gauss_newton_products(self, v: Params) -> Params:
        r"""Multiply :math:`\sum_i w_i J_i^\top H_{L_i} J_i` with ``v``."""
        total = {key: torch.zeros_like(p) for key, p in self._params.items()}
        for loss, weight in self._known_losses():
            pushed = weight * loss.hessian_product(self._pushed_forward(loss.output, v))
            part = self._pulled_back([loss.output], [pushed])
            total = {key: total[key] + part[key] for key in total}
        return total

    def diagonal(
        self, request: Diagonal, *, probes: Sequence[Params] | None = None, retain_graph: bool = True
    ) -> Params:
        """Estimate a diagonal.

        Args:
            request: Which.
            probes: Of the Hessian, in place of random ones; as many as there are, whatever ``request.samples`` says.
            retain_graph: Keep the graph for more.
        """
        if request.matrix == "hessian":
            drawn = self._probes(request) if probes is None else iter(probes)
            count = request.samples if probes is None else len(probes)
            samples = (
                _products(z, self.products(z, retain_graph=retain_graph or index + 1 < count))
                for index, z in enumerate(drawn)
            )
        else:
            count = request.samples
            samples = (self._squared_scores(retain_graph or index + 1 < count) for index in range(count))
        return _mean(samples, count)

    def _probes(self, request: Diagonal) -> Iterator[Params]:
        for _ in range(request.samples):
            yield {
                key: drawn_like(g, request.distribution, self._generators(g.device))
                for key, g in self._grads.items()
            }

    def _squared_scores(self, retain_graph: bool) -> Params:
        """Return the squared gradient of a loss with drawn labels, which in expectation is the diagonal."""
        total: Params = {}
        losses = self._known_losses()
        for index, (loss, weight) in enumerate(losses):
            score = weight.abs().sqrt() * loss.score(self._generators(loss.output.device))
            keep = retain_graph or index + 1 < len(losses)
            found = self._pulled_back([loss.output], [score], retain_graph=keep)
            # Of half precision in float32: in float16 the squares of small numbers are zero.
            squares = {key: weight.sign() * _product(g, g) for key, g in found.items()}
            total = {key: total[key] + square for key, square in squares.items()} if total else squares
        return total

    def _known_losses(self) -> Sequence[WeightedLoss]:
        losses = self._losses() if callable(self._losses) else self._losses
        if not losses:
            raise ValueError(
                "TapeCurvature: the Gauss-Newton matrix needs a loss of known form, and none is known. Compute the "
                "loss by F.cross_entropy, F.mse_loss, F.nll_loss, F.gaussian_nll_loss, F.binary_cross_entropy or "
                "F.binary_cross_entropy_with_logits, with a mean or a sum, or use the Hessian."
            )
        return losses

    def _pushed_forward(self, output: Tensor, v: Params) -> Tensor:
        """Multiply the Jacobian of an output with ``v``; its transposed product is recorded once."""
        if output not in self._recorded:
            self._recorded[output] = transposed_product([output], [*self._params.values()])
        tangents = [v[key] for key in self._params]
        (pushed,) = self._recorded[output].jvp(tangents, create_graph=self._create_graph, retain_graph=True)
        return torch.zeros_like(output) if pushed is None else pushed

    def _pulled_back(
        self, outputs: list[Tensor], cotangents: list[Tensor], *, retain_graph: bool = True
    ) -> Params:
        if not self._create_graph:
            cotangents = [cotangent.detach() for cotangent in cotangents]
        found = graph_vjp(
            outputs,
            [*self._params.values()],
            cotangents,
            create_graph=self._create_graph,
            retain_graph=retain_graph or self._create_graph,
        )
        return {
            key: torch.zeros_like(self._grads[key]) if f is None else as_rows(f)
            for key, f in zip(self._params, found, strict=True)
        }


def _in_layout_of(gradient: Tensor, v: Tensor) -> Tensor:
    is_coo = gradient.layout == torch.sparse_coo
    return v.to_coo() if is_coo and isinstance(v, RowSparse) else v


def _products(z: Params, products: Params) -> Params:
    return {key: _product(z[key], product) for key, product in products.items()}


def _product(a: Tensor, b: Tensor) -> Tensor:
    return widened(a) * widened(b)


def _mean(samples: Iterator[Params], count: int) -> Params:
    total = dict(next(samples))
    for sample in samples:
        total = {key: total[key] + value for key, value in sample.items()}
    return total if count == 1 else {key: value / count for key, value in total.items()}
