"""Norms of a linear map, and traces of its diagonal blocks, from products with random probes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from metagrad.core.checks import is_a
from metagrad.curvature.estimators.estimate import Estimate, from_samples, standard_error
from metagrad.curvature.estimators.hutchinson import Hutchinson
from metagrad.curvature.estimators.probes import Distribution
from metagrad.curvature.estimators.probing import Probing, checked_budget, spend
from metagrad.curvature.linear_map import LinearMap


def frobenius_norm(
    operator: LinearMap,
    *,
    probes: int | None = None,
    rtol: float | None = None,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> Estimate:
    r"""Estimate the Frobenius norm of a symmetric linear map.

    .. math:: \lVert A \rVert_F^2 = E \lVert A z \rVert^2, \qquad E[z z^T] = I

    The root of the mean over the probes; its standard error is that of the mean by the delta method, and its
    bias, of the order of 1 / probes, is below it.

    Args:
        operator: The map, n x n and symmetric.
        probes: How many products to spend, one for each probe; 64 by default. With ``rtol``, at most so many, 1024 by
            default.
        rtol: Stop when the 95 % interval's half-width is at most ``rtol`` times the norm, as :func:`trace` does.
        distribution: "rademacher", "normal" or "sphere", see :func:`draw`.
        generator: Draws the probes; the same state gives the same bits.
        chunk: Probes are drawn and multiplied in pieces of so many bytes.

    Returns:
        The norm, differentiable where the products are; except at zero, where a norm has no derivative.

    Raises:
        ValueError: A product has NaN or inf, or an argument is out of range.
        TypeError: An argument has the wrong type.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.estimators.norms import frobenius_norm
        >>> A = torch.diag(torch.tensor([3.0, 4.0]))
        >>> H = SimpleNamespace(shape=A.shape, dtype=A.dtype, device=A.device, products=lambda v: v @ A)
        >>> frobenius_norm(H, probes=4).value
        tensor(5.)

    References:
        Martinsson, Tropp, "Randomized numerical linear algebra", Acta Numerica 29, 2020, section 4.8.
    """
    call = "frobenius_norm(operator, ...)"
    budget = checked_budget(call, probes, rtol)
    return spend(_SquaredNorms(Probing(call, operator, distribution, generator, chunk)), budget, rtol)


class _SquaredNorms(Hutchinson):
    """The mean of the squares."""

    def estimate(self) -> Estimate:
        probing, square = self.probing, self.squares.mean()
        value = square.sqrt()
        known = value.detach()
        error = standard_error(self.squares.detach(), torch.zeros_like(known))
        if len(self.squares) > 1:
            error = torch.where(known > 0, error / (2 * known), 0.0).hypot(probing.rounding(known))
        return Estimate(
            value, error, len(self.squares), probing.matvecs, "hutchinson", quantity="Frobenius norm"
        )


def layer_traces(
    operator: LinearMap,
    blocks: Mapping[str, slice],
    *,
    probes: int | None = None,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
    chunk: str | int | float = "64MiB",
) -> dict[str, Estimate]:
    r"""Estimate the trace of every diagonal block, all from the same products.

    .. math:: \mathrm{tr} A_{bb} = E[z_b^T (A z)_b], \qquad E[z z^T] = I

    What couples a block to others adds variance, not bias: a block alone, by :func:`trace` on its own operator,
    has a smaller error for the same number of products, but its products are for it alone.

    Args:
        operator: The map, n x n and symmetric.
        blocks: Where each block is, by name; they may overlap, and need not cover everything.
        probes: How many products to spend, one for each probe; 64 by default.
        distribution: "rademacher", "normal" or "sphere", see :func:`draw`.
        generator: Draws the probes; the same state gives the same bits.
        chunk: Probes are drawn and multiplied in pieces of so many bytes.

    Returns:
        For each block its trace, by Hutchinson's method; ``matvecs`` counts the products that all share. The
        estimates of one call are correlated. They are differentiable where the products are.

    Raises:
        ValueError: There are no blocks, a block is empty, has a step or leaves the map, a product has NaN
            or inf, or an argument is out of range.
        TypeError: A block is no slice, or an argument has the wrong type.

    Example:
        >>> from types import SimpleNamespace
        >>> from metagrad.curvature.estimators.norms import layer_traces
        >>> A = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> H = SimpleNamespace(shape=A.shape, dtype=A.dtype, device=A.device, products=lambda v: v @ A)
        >>> found = layer_traces(H, {"body": slice(0, 2), "head": slice(2, 3)}, probes=4)
        >>> float(found["body"]), float(found["head"])
        (3.0, 3.0)

    References:
        Hutchinson, Commun. Stat. Simul. 18(3), 1989; Dong et al., "HAWQ-V2: Hessian aware trace-weighted quantization
        of neural networks", NeurIPS 2020, for traces of layers.
    """
    call = "layer_traces(operator, blocks)"
    budget = checked_budget(call, probes, None)
    probing = Probing(call, operator, distribution, generator, chunk)
    spans = _checked_blocks(call, blocks, probing.n)

    def forms(probes: Tensor, products: Tensor) -> Tensor:
        dots = [(probes[:, span] * products[:, span]).sum(1) for span in spans]
        squares = [products[:, span].detach().square().sum(1) for span in spans]
        return torch.stack([torch.stack(dots, 1), torch.stack(squares, 1)], 2)

    found = probing.reduced(budget, forms)  # [probes, blocks, 2]
    floors = probing.rounding(found[..., 1].mean(0).sqrt())
    return {
        name: from_samples(
            found[:, k, 0],
            floors[k],
            matvecs=probing.matvecs,
            method="hutchinson",
            quantity=f"trace of {name}",
        )
        for k, name in enumerate(blocks)
    }


def _checked_blocks(call: str, blocks: Mapping[str, slice], n: int) -> list[slice]:
    if not blocks:
        raise ValueError(f"{call}: expected at least one block, got none.")
    for name, block in blocks.items():
        if not is_a(block, slice):
            raise TypeError(f"{call}: blocks[{name!r}] must be a slice, got {type(block).__name__}.")
        start, stop = block.start or 0, n if block.stop is None else block.stop
        if block.step not in (None, 1) or not 0 <= start < stop <= n:
            raise ValueError(
                f"{call}: blocks[{name!r}] must be a slice with 0 <= start < stop <= {n} and no step, got {block}."
            )
    return list(blocks.values())
