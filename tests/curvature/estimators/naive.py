"""The estimators by their definitions: a basis, or an inverse, for every probe that is left out."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from metagrad.curvature.estimators.probing import ProbeSampler
from metagrad.curvature.estimators.trace import HutchPlusPlus
from metagrad.curvature.estimators.xtrace import XTrace
from tests.curvature.maps import MatrixMap


def fitted(cls, matrix: Tensor, products: int, distribution="rademacher", seed=0, batches=1):
    """An estimator that has spent its products, in equal batches."""
    generator = torch.Generator().manual_seed(seed)
    estimator: XTrace | HutchPlusPlus = cls(
        ProbeSampler("trace(operator, ...)", MatrixMap(matrix), distribution, generator, "64MiB")
    )
    for _ in range(batches):
        estimator.extend(products // batches)
    return estimator


def without(rows: Tensor, left_out: Collection[int]) -> Tensor:
    return rows[[i for i in range(len(rows)) if i not in left_out]]


def off(span: Tensor) -> Tensor:
    """The projector off the span of rows, [n, n]."""
    q = torch.linalg.qr(span.t())[0]
    return torch.eye(span.shape[1], dtype=span.dtype) - q @ q.t()


def _resphered(probe: Tensor, dimension: int, distribution: str) -> Tensor:
    return probe * (dimension**0.5 / probe.norm()) if distribution == "sphere" else probe


def xtrace(A: Tensor, probes: Tensor, i: int, left_out: Collection[int], distribution: str) -> Tensor:
    """The i-th estimate, with i and perhaps others left out of the basis."""
    others = without(probes, {i, *left_out})
    P = off(others @ A)
    g = _resphered(P @ probes[i], len(A) - len(others), distribution)
    return A.trace() - (P @ A @ P).trace() + g @ A @ g
