"""Traces, eigenvalues and spectral density of one curvature matrix, as rows of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from metagrad.curvature import Density, Estimate

if TYPE_CHECKING:
    from collections.abc import Callable

    from experiments.studies.curvature.schema import Quantities
    from metagrad.curvature import Operator

TOTAL = "total"


@dataclass(frozen=True)
class Measurement:
    """What was found at one step: `metrics` by name, the density, and how many products it took."""

    metrics: dict[str, float]
    density: Density
    products: int


def measure(
    operator: Operator, config: Quantities, seed: int, progress: Callable[[str], None] = lambda part: None
) -> Measurement:
    """Measure a matrix; every step of a run has the same probes, so that what differs is the matrix.

    Args:
        operator: The matrix.
        config: What is measured, and how precisely.
        seed: Of the probes.
        progress: Is called with the name of each part as it begins.
    """
    generator = torch.Generator(operator.device).manual_seed(seed)
    progress("trace")
    trace = operator.trace(method=config.trace.method.value, probes=config.trace.probes, generator=generator)
    progress("traces of layers")
    layers = {
        layer: operator[layer].trace(method="hutchinson", probes=config.trace.probes, generator=generator)
        for layer in dict.fromkeys(name.rpartition(".")[0] or name for name in operator.space.names)
    }
    progress("eigenvalues")
    settings = config.eigenvalues
    pairs = operator.eigenvalues(
        settings.count, rtol=settings.rtol, max_products=settings.max_products, vectors=False, generator=generator
    )  # fmt: skip
    progress("density")
    density = smoothed(
        operator.density(steps=config.density.steps, probes=config.density.probes, generator=generator)
    )
    metrics = named({TOTAL: trace, **layers})
    for i, (value, bound) in enumerate(zip(pairs.values, pairs.residuals, strict=True), start=1):
        metrics |= {f"eigenvalue/{i}": value.item(), f"eigenvalue/{i}_residual": bound.item()}
    # A Ritz value: the smallest eigenvalue is there or below.
    metrics["eigenvalue/lowest_seen"] = density.nodes.min().item()
    products = sum(found.matvecs for found in (trace, *layers.values(), pairs, density))
    return Measurement(metrics, density, products)


def named(traces: dict[str, Estimate]) -> dict[str, float]:
    """Flatten traces into metrics: `trace/NAME` and the half-width of its 95 % interval, `trace/NAME_ci95`."""
    metrics = {}
    for name, trace in traces.items():
        low, high = trace.interval(0.95)
        metrics |= {f"trace/{name}": trace.value.item(), f"trace/{name}_ci95": (high - low).item() / 2}
    return metrics


def smoothed(density: Density) -> Density:
    """Widen the Gaussians to what so many Lanczos steps resolve: half the distance of Ritz values in the bulk.

    Narrower ones show a comb of Ritz values where there is a continuum of eigenvalues.
    """
    spread = (density.nodes.max() - density.nodes.min()).item()
    return replace(density, sigma=max(density.sigma, spread / (1.5 * density.nodes.shape[1])))


def row_of(density: Density) -> dict[str, Any]:
    """Return a density as JSON values."""
    return {
        "n": density.n,
        "sigma": density.sigma,
        "matvecs": density.matvecs,
        "nodes": density.nodes.tolist(),
        "weights": density.weights.tolist(),
    }


def density_of(row: dict[str, Any]) -> Density:
    """Return the density that `row_of` wrote."""
    nodes, weights = (torch.tensor(row[name], dtype=torch.float64) for name in ("nodes", "weights"))
    return Density(nodes, weights, sigma=row["sigma"], n=row["n"], matvecs=row["matvecs"])
