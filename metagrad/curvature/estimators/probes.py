"""Random probes: rows z with E[z z^T] = I, drawn in pieces that fit, multiplied and counted up to a budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from metagrad.core._torch import linalg
from metagrad.core.budget import checked_bytes
from metagrad.core.checks import check_choice, check_count, check_positive, check_type
from metagrad.curvature.estimators.estimate import Estimate, from_samples
from metagrad.curvature.linear_map import LinearMap, checked_products, checked_size
from metagrad.curvature.rows import norm

Distribution = Literal["rademacher", "normal", "sphere"]
FIRST = 16  # products before the interval is first checked, because the spread of fewer samples is unreliable
LEVEL = 0.95  # confidence level of the interval that rtol bounds
PROBES = 64  # default number of products
MOST_PROBES = 1024  # default maximum number of products if rtol is given


def sample_probes(
    count: int,
    n: int,
    *,
    distribution: Distribution = "rademacher",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Draw probes, rows :math:`z` with :math:`E[z z^T] = I`.

    ============ ==========================================================================================
    distribution probes
    ============ ==========================================================================================
    "rademacher" signs. The diagonal of :math:`A` adds no variance to :math:`z^T A z`.
    "normal"     independent standard normal elements. Rotation invariant.
    "sphere"     uniform directions of norm :math:`\sqrt n`. Rotation invariant, with less variance.
    ============ ==========================================================================================

    Every row is drawn by its own call, so rows drawn in several calls are bitwise identical to rows drawn in one.

    Args:
        count: Number of probes, 1 or more.
        n: Number of elements of each probe, 0 or more.
        distribution: A row of the table.
        dtype: A floating point dtype.
        device: Device of the probes.
        generator: Draws the numbers on its own device, before they move to ``device``. The default is torch's default
            generator of ``device``. The same state gives bitwise identical probes.

    Returns:
        The probes, shape [count, n].

    Raises:
        ValueError: ``distribution`` is unknown, or a number is out of range.
        TypeError: ``generator`` is not a :class:`torch.Generator`, or ``dtype`` is not floating point.

    Example:
        >>> from metagrad.curvature.estimators.probes import sample_probes
        >>> z = sample_probes(4, 9, distribution="sphere", generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(z.square().sum(1), torch.full((4,), 9.0))
        True

    References:
        Girard, Numer. Math. 56, 1989, for normal probes; Hutchinson, Commun. Stat. Simul. 18(3), 1989, for signs;
        Epperly, Tropp, Webber, "XTrace", SIAM J. Matrix Anal. Appl. 45(1), 2024, for the sphere.
    """
    check_choice("sample_probes(...): distribution", distribution, Distribution)
    check_type("sample_probes(...): generator", generator, torch.Generator, optional=True)
    check_count("sample_probes(count, n): count", count)
    check_count("sample_probes(count, n): n", n, 0)
    if not dtype.is_floating_point:
        raise TypeError(f"sample_probes(..., dtype): expected a floating point dtype, got {dtype}.")
    place = generator.device if generator is not None else device
    rows = torch.empty(count, n, dtype=dtype, device=place)
    for row in rows:
        fill(row, distribution, generator)
    return rows if device is None else rows.to(device)


def draw_for(
    operator: LinearMap, count: int, distribution: Distribution, generator: torch.Generator | None
) -> Tensor:
    """Draw probes, [count, n], for an operator."""
    dtype, device = operator.dtype, operator.device
    n = operator.shape[0]
    return sample_probes(count, n, distribution=distribution, dtype=dtype, device=device, generator=generator)


def fill(row: Tensor, distribution: Distribution, generator: torch.Generator | None) -> Tensor:
    """Draw the elements of a probe in place, and return it."""
    if distribution == "rademacher":
        return row.random_(0, 2, generator=generator).mul_(2).sub_(1)
    row.normal_(generator=generator)
    return row.mul_(math.sqrt(row.numel()) / norm(row)) if distribution == "sphere" else row


class ProbeSampler:
    """A linear map and the random probes that are multiplied with it.

    Attributes:
        n: Size of the map.
        budget: Maximum number of products.
        rtol: Relative error that ends the products earlier. None if the whole budget is spent.
        rows: Number of probes that fit into a chunk, with ``stored`` vectors each: by default the probe, its product,
            the result of both, and memory to join them.
        matvecs: Number of products so far.
    """

    def __init__(
        self,
        call: str,
        operator: LinearMap,
        distribution: Distribution,
        generator: torch.Generator | None,
        chunk: str | int | float,
        budget: int = MOST_PROBES,
        rtol: float | None = None,
        stored: int = 4,
    ) -> None:
        check_choice(f"{call}: distribution", distribution, Distribution)
        check_type(f"{call}: generator", generator, torch.Generator, optional=True)
        self.call = call
        self.operator = operator
        self.n: int = checked_size(call, operator)
        self.distribution: Distribution = distribution
        self.generator = generator
        size = max(1, stored * self.n * operator.dtype.itemsize)
        self.rows: int = max(1, checked_bytes(call, "chunk", chunk) // size)
        self.budget = budget
        self.rtol = rtol
        self.matvecs: int = 0

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the dtype and on the device of the map."""
        return torch.zeros(shape, dtype=self.operator.dtype, device=self.operator.device)

    def draw(self, count: int) -> Tensor:
        """Draw the next probes, [count, n]."""
        return draw_for(self.operator, count, self.distribution, self.generator)

    def multiply(self, vectors: Tensor) -> Tensor:
        """Multiply rows. Raise ``ValueError`` if products are not finite or have another shape."""
        found = checked_products(self.call, self.operator, vectors)
        self.matvecs += len(vectors)
        return found

    def drawn(self, count: int) -> Iterator[Tensor]:
        """Draw ``count`` probes, in pieces that fit into a chunk, of at most the operator's ``num_together``."""
        while count > 0:
            size = min(count, self.rows, getattr(self.operator, "num_together", None) or self.rows)
            yield self.draw(size)
            count -= size

    def pieces(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw and multiply ``count`` probes, in the pieces of :meth:`drawn`."""
        for probes in self.drawn(count):
            yield probes, self.multiply(probes)

    def rounding(self, norm: Tensor) -> Tensor:
        """Return the size of rounding errors in a trace, given the Frobenius norm of the map."""
        return torch.finfo(self.operator.dtype).eps * self.n**0.5 * norm.detach()


class Generators(dict[torch.device, torch.Generator]):
    """The random generator of each device, made from a seed. After ``clear()`` all begin again.

    So there is no state of a generator to save. Every pass over the data, a resumed run, a copy of an optimizer and
    every micro-batch of one step draw the same numbers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = torch.Generator(device).manual_seed(self.seed)
        return self[device]


class Estimator(Protocol):
    """An estimate that improves with every product."""

    name: ClassVar[str]
    least: ClassVar[int] = 1
    """Minimum number of products."""
    has_subspace: ClassVar[bool] = True
    """Whether probes are projected, so that the sphere is the default distribution."""
    probing: ProbeSampler

    def extend(self, products: int) -> None:
        """Spend ``products`` more products, or fewer if further products add no information."""
        ...

    def estimate(self) -> Estimate:
        """Estimate from all products so far."""
        ...

    def trace_from(self, samples: Tensor, floor: Tensor, **parts: Tensor | None) -> Estimate:
        """Estimate a trace from samples, by :func:`from_samples`."""
        products = self.probing.matvecs
        return from_samples(samples, floor, matvecs=products, method=self.name, quantity="trace", **parts)


def checked_budget(call: str, probes: int | None, rtol: float | None, least: int = 1) -> int:
    """Return the maximum number of products."""
    check_positive(f"{call}: rtol", rtol, optional=True)
    check_count(f"{call}: probes", probes, least, optional=True)
    if probes is not None:
        return probes
    return PROBES if rtol is None else MOST_PROBES


def spend(estimator: Estimator, budget: int, rtol: float | None, least: int = 1) -> Estimate:
    """Spend the budget, or with ``rtol`` as much of it as is needed.

    Batches make the total 16, 24, 36, ... Each batch grows the total by half, so at most a third of the
    products are unnecessary. The interval is checked only a few times, because each check is a chance to stop
    too early. A batch has at least ``least`` products.
    """
    if rtol is None:
        estimator.extend(budget)
        return estimator.estimate()
    estimate = None
    for batch in batches(budget, least):
        estimator.extend(batch)
        estimate = estimator.estimate()
        if is_tight(estimate, rtol):
            return estimate
    assert estimate is not None
    return dataclasses.replace(estimate, converged=False)


def is_tight(estimate: Estimate, rtol: float) -> bool:
    """Return whether the half-width at 95 % is within rtol times the value, by Euclidean norms."""
    value = estimate.value.detach()
    half_width = estimate.interval(LEVEL)[1].detach() - value
    return bool(linalg.vector_norm(half_width) <= rtol * linalg.vector_norm(value))


def batches(budget: int, least: int, first: int = FIRST) -> Iterator[int]:
    """Yield batches that sum to the budget. Each batch after the first grows the total by half.

    The last batch includes a remainder that is too small for its own batch.
    """
    spent = 0
    while spent < budget:
        batch = min(max(first if not spent else spent // 2, least), budget - spent)
        if budget - spent - batch < least:
            batch = budget - spent
        yield batch
        spent += batch
