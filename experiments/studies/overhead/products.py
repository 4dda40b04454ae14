"""Ways to products with the Hessian of a loss, to the Hessian of its last layer, and to the trace of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import metagrad as mg
from experiments.studies.overhead.gradients import accumulated_gradient, gradient, pieces
from experiments.studies.overhead.run import Run, at_once, dense, flat
from experiments.studies.overhead.work import Work

PROBES = 64


def accumulated_second(work: Work) -> Run:
    """The gradient of all data, and then the products with it, one mini-batch after the other."""
    run = accumulated_gradient(work)

    def compute() -> Any:
        grads = dict(zip(work.params, run.finish(None), strict=True))
        with hessian(work, batches=pieces(work)) as H:
            return H @ grads

    return at_once(compute)


def hessian(work: Work, batches: Any = None) -> Any:
    """Return the operator of the Hessian."""
    return mg.hessian(work.loss, work.params, batches or (work.x, work.y))


def direction(work: Work) -> dict[str, Tensor]:
    """Return the gradient, which the Hessian is multiplied with."""
    run = gradient(work)
    return dict(zip(work.params, run.finish(run.hold()), strict=True))


def forward_over_reverse(work: Work) -> Run:
    """One product without a graph that is kept."""
    v = direction(work)
    return at_once(lambda: mg.hvp(work.loss, work.params, v, work.x, work.y, mode="forward").product)


def product(work: Work, batches: Callable[[Work], Any] | None = None) -> Run:
    """Multiply by an operator that is there.

    Raises:
        ValueError: Gradients are row-sparse, which the operator does not take.
    """
    if work.tables:
        raise ValueError("Hessian products take dense gradients")
    v = direction(work)
    return Run(
        lambda: hessian(work, None if batches is None else batches(work)),
        lambda H: H @ v,
        is_kept=True,
    )


def product_anew(work: Work) -> Run:
    """Build the graph of the gradient for one product, and free it."""
    run = product(work)
    return at_once(lambda: run.finish(run.hold()))


def finite_difference(work: Work) -> Run:
    r"""Two gradients, at :math:`\theta \pm \epsilon v`, with the step that balances truncation and rounding.

    References:
        Nocedal, Wright, "Numerical optimization", 2nd edition, 2006, section 8.1.
    """
    params, v = work.params, {name: dense(part) for name, part in direction(work).items()}
    norm = torch.linalg.vector_norm(flat(list(v.values())))
    epsilon = (torch.finfo(work.dtype).eps ** (1 / 3) / norm).item()

    def at(sign: int) -> Sequence[Tensor]:
        point = {name: (p + sign * epsilon * v[name]).detach().requires_grad_() for name, p in params.items()}
        return torch.autograd.grad(work.loss(point, work.x, work.y), list(point.values()))

    def compute() -> list[Tensor]:
        return [(dense(a) - dense(b)) / (2 * epsilon) for a, b in zip(at(1), at(-1), strict=True)]

    return at_once(compute)


def head_hessian(work: Work) -> Run:
    """The matrix, one product for each column."""
    return Run(lambda: _head(work), lambda H: H.to_dense())


def exact_trace(work: Work) -> Run:
    """The trace of that matrix."""
    return Run(lambda: _head(work), lambda H: H.to_dense().trace())


def hutchinson(work: Work) -> Run:
    """The trace from products with random signs."""
    generator = torch.Generator(work.x.device)
    return Run(
        lambda: _head(work),
        lambda H: H.trace(method="hutchinson", probes=PROBES, generator=generator.manual_seed(0)).value,
    )


def _head(work: Work) -> Any:
    return mg.hessian(work.loss_fn(work.model(work.x), work.y), work.head)
