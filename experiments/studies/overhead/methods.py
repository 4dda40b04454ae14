"""All that is measured, by what is computed and by the remedy for its cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from experiments.studies.overhead.gradients import (
    accumulated_gradient,
    compiled_gradient,
    compiled_second,
    gradient,
    pieces,
    second,
)
from experiments.studies.overhead.inner import INNER_WAYS
from experiments.studies.overhead.products import (
    accumulated_second,
    exact_trace,
    finite_difference,
    forward_over_reverse,
    head_hessian,
    hutchinson,
    product,
    product_anew,
)
from experiments.studies.overhead.run import Run
from experiments.studies.overhead.work import CHANGES, DENSE, Work

GRADIENT, SECOND, PRODUCT = "gradient", "second derivative", "Hessian product"
HESSIAN, TRACE, META = "Hessian of the last layer", "trace of that Hessian", "meta-gradient"

WAYS: dict[str, dict[str, Callable[[Work], Run]]] = {
    GRADIENT: {"": gradient, "accumulated": accumulated_gradient, "compiled": compiled_gradient},
    SECOND: {"": second, "accumulated": accumulated_second, "compiled": compiled_second},
    PRODUCT: {
        "": product,
        "graph built anew": product_anew,
        "forward over reverse": forward_over_reverse,
        "finite difference": finite_difference,
        "accumulated": partial(product, batches=pieces),
    },
    HESSIAN: {"": head_hessian},
    TRACE: {"": exact_trace, "Hutchinson": hutchinson},
    META: INNER_WAYS,
}
"""Ways to what is computed, by the remedy that they are; the first is what the others are compared with."""

UNCHANGED = (HESSIAN, TRACE)
"""What is computed in its own ways alone."""
SPARSE = ("graph", "table")
"""Models whose gradients are sparse, and could be dense."""


def remedies(quantity: str, model: str) -> list[str]:
    """Return all remedies for the cost of what is computed of a model; the first is none."""
    changes = [name for name in CHANGES if name != DENSE or model in SPARSE]
    return [*WAYS[quantity], *([] if quantity in UNCHANGED else changes)]


def prepared(quantity: str, remedy: str, work: Work) -> Run:
    """Make a run.

    Raises:
        ValueError: The remedy is none for the model.
    """
    ways = WAYS[quantity]
    return ways[remedy](work) if remedy in ways else ways[""](CHANGES[remedy](work))
